// How the page talks to the server: with fetch instead of EventSource, since the key is sent in a header.
// Addresses are relative, so the page also works behind a proxy that adds a prefix to them.

let key = "";

export function useKey(newKey) {
  key = newKey;
}

export function hasKey() {
  return key !== "";
}

/** An error that the server responded with. */
export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // seconds, or null
  }
}

/** Send a GET request, or POST if there is a body. Throws Refused, or what fetch throws if no response comes. */
export async function request(path, content, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (content) {
    Object.assign(options, { method: "POST", body: JSON.stringify(content) });
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (response.ok) return response;
  const body = await response.json().catch(() => null); // a proxy's errors need not be JSON
  const message = body?.error?.message ?? "The server gave no reason.";
  throw new Refused(response.status, message, response.headers.get("Retry-After"));
}

/** Yield the objects of a stream of server-sent events as they come. */
export async function* messages(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop(); // it is not complete yet
    for (const event of events) {
      if (event !== "data: [DONE]") yield JSON.parse(event.slice("data: ".length));
    }
  }
}
