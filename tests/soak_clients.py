"""The clients of the soak (soak.py), in a process that has nothing else to do: no model is loaded here.

They read what to do from standard input, and write how each of their requests ended.
"""

import asyncio
import json
import random
import sys
import time

import aiohttp

PATIENCE = 120  # seconds until a client says that it was forgotten


async def all_clients(plan: dict) -> None:
    """All of them, each as soon as it is its turn: an open loop, which does not wait for answers to ask again."""
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


async def one_client(session, url: str, wanted: list, stream: bool, leaves: bool, moment: float) -> str:
    """How the request ended. `moment`, from 0 to 1, says when a client leaves: after a while, or after some tokens."""
    prompt, max_tokens, text, tokens = wanted
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    by_tokens = stream and leaves and moment < 0.5
    seconds = PATIENCE if by_tokens or not leaves else 0.001 * 2000**moment  # 1 ms to 2 s, more often early than late
    try:
        async with asyncio.timeout(seconds), session.post(url + "/v1/completions", json=asked) as response:
            if response.status == 429:
                error = (await response.json())["error"]
                told = error["code"] == "queue_full" and 1 <= int(response.headers["Retry-After"]) <= 60
                return "refused" if told else f"refused without a reason: {error}"
            if response.status != 200:
                return f"status {response.status}: {await response.text()}"
            if not stream:
                answer = await response.json()
                said, usage = answer["choices"][0]["text"], answer["usage"]
            else:
                said, chunks, usage = "", 0, None
                async for line in response.content:
                    if line.strip() in (b"", b"data: [DONE]"):
                        continue
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        return f"an error in a stream: {chunk}"
                    usage, chunks = chunk.get("usage"), chunks + 1
                    said += "".join(choice["text"] for choice in chunk["choices"])
                    if by_tokens and chunks > 2 * moment * max_tokens:
                        response.close()
                        return "left"
            exact = said == text and usage["completion_tokens"] == tokens
            return "answered" if exact else f"{said!r} instead of {text!r}, {usage}"
    except TimeoutError:
        return "left" if leaves else f"no answer within {PATIENCE} s"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    asyncio.run(all_clients(json.loads(sys.stdin.readline())))
