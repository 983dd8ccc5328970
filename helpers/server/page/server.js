// How the page talks to the server: with fetch instead of EventSource, because a key travels in a header.
// Addresses are relative, so the page also works behind a proxy that puts something before them.

let key = "";

export function useKey(newKey) {
  key = newKey;
}

export function hasKey() {
  return key !== "";
}

/** What the server answers instead of what was asked for. */
export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter; // seconds, or null
  }
}

/** GET, or POST if there is a body. Throws Refused, or what fetch throws if nobody answers. */
export async function ask(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
  }
  const response = await fetch(path, options);
  if (response.ok) return response;
  const said = await response.json().catch(() => null); // a proxy's errors need not be JSON
  const message = said?.error?.message ?? "The server gives no reason.";
  throw new Refused(response.status, message, response.headers.get("Retry-After"));
}

/** The objects of a stream of server-sent events, as they come. */
export async function* messages(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop(); // one that is not complete
    for (const event of events) {
      if (event !== "data: [DONE]") yield JSON.parse(event.slice("data: ".length));
    }
  }
}
