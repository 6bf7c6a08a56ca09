# SPDX-License-Identifier: Apache-2.0
"""Asks a server of `server.py` from many clients at once; prints how long.

python examples/load.py http://127.0.0.1:8501 '{"ids": [1, 2, 3]}'
"""

import argparse
import http.client
import json
import threading
import time
import urllib.parse

PREDICT = "/v1/models/model:predict"


def ask(
    address: str, body: str, end: float, times: list[float], errors: list[str]
) -> None:
    """Asks one question after the other until the end."""
    connection = http.client.HTTPConnection(address, timeout=30)
    while (start := time.perf_counter()) < end:
        try:
            connection.request("POST", PREDICT, body)
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status != 200:
                errors.append(text)
        except OSError as error:
            errors.append(repr(error))
            connection.close()
        times.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("url", help="of the server")
    add("instance", help="to ask for, JSON")
    add("--clients", type=int, default=100, help="at once")
    add("--seconds", type=float, default=10.0, help="for how long")
    arguments = parser.parse_args()
    address = urllib.parse.urlparse(arguments.url).netloc
    body = json.dumps({"instances": [json.loads(arguments.instance)]})
    times: list[float] = []
    errors: list[str] = []
    end = time.perf_counter() + arguments.seconds
    threads = [
        threading.Thread(target=ask, args=(address, body, end, times, errors))
        for _ in range(arguments.clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times.sort()
    p50, p99 = (1000 * times[int(len(times) * q)] for q in (0.5, 0.99))
    print(
        f"{arguments.clients} clients: {len(times) / arguments.seconds:.0f} "
        f"requests/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms, "
        f"{len(errors)} errors {errors[:1] or ''}"
    )


if __name__ == "__main__":
    main()
