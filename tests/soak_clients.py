"""The clients of the soak (soak.py), in a process that has nothing else to do: no model is loaded here.

They read their plan from standard input and write how each of their requests ended.
"""

import asyncio
import json
import random
import sys
import time

import aiohttp

PATIENCE = 120  # seconds until a client reports that it got no response


async def all_clients(plan: dict) -> None:
    """Send each request at its time: an open loop, in which no request waits for an earlier response."""
    chance, start = random.Random(plan["seed"]), time.perf_counter()
    tasks, now = [], 0.0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(plan["requests"]):
            now += chance.expovariate(plan["rate"])
            await asyncio.sleep(max(0.0, start + now - time.perf_counter()))
            if number == plan["requests"] // 2:
                print("half", flush=True)
            leaves = chance.random() < plan["leaving"]
            one = one_client(
                session, plan["url"], chance.choice(plan["pool"]), chance.random() < 0.5, leaves, chance.random()
            )
            tasks.append(asyncio.create_task(one))
        sent = time.perf_counter() - start
        ends = await asyncio.gather(*tasks)
    print(json.dumps({"seconds": time.perf_counter() - start, "sent": sent, "ends": ends}), flush=True)


async def one_client(session, url: str, expected: list, stream: bool, leaves: bool, moment: float) -> str:
    """Return how a request ended. `moment`, from 0 to 1, says when its client leaves: after a time or some tokens."""
    prompt, max_tokens, text, tokens = expected
    settings = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    if stream:
        settings["stream_options"] = {"include_usage": True}
    by_tokens = stream and leaves and moment < 0.5
    seconds = PATIENCE if by_tokens or not leaves else 0.001 * 2000**moment  # 1 ms to 2 s, more often early than late
    try:
        async with asyncio.timeout(seconds), session.post(url + "/v1/completions", json=settings) as response:
            if response.status == 429:
                error = (await response.json())["error"]
                is_explained = error["code"] == "queue_full" and 1 <= int(response.headers["Retry-After"]) <= 60
                return "refused" if is_explained else f"refused without a reason: {error}"
            if response.status != 200:
                return f"status {response.status}: {await response.text()}"
            if not stream:
                content = await response.json()
                received, usage = content["choices"][0]["text"], content["usage"]
            else:
                received, chunks, usage = "", 0, None
                async for line in response.content:
                    if line.strip() in (b"", b"data: [DONE]"):
                        continue
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        return f"an error in a stream: {chunk}"
                    usage, chunks = chunk.get("usage"), chunks + 1
                    received += "".join(choice["text"] for choice in chunk["choices"])
                    if by_tokens and chunks > 2 * moment * max_tokens:
                        response.close()
                        return "left"
            exact = received == text and usage["completion_tokens"] == tokens
            return "completed" if exact else f"{received!r} instead of {text!r}, {usage}"
    except TimeoutError:
        return "left" if leaves else f"no response within {PATIENCE} s"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    asyncio.run(all_clients(json.loads(sys.stdin.readline())))
