# SPDX-License-Identifier: Apache-2.0
"""Serves an exported model over REST, and follows its deltas.

python examples/server.py FOLDER [--port 8501] [--deltas FOLDER]

Answers as TensorFlow Serving does, with TensorFlow and Python's library only:

curl -d '{"instances": [{"ids": [1, 2, 3]}]}' \\
    http://127.0.0.1:8501/v1/models/model:predict

GET http://127.0.0.1:8501/v1/models/model tells which delta it has and how old
it is. An example: it trusts whoever reaches its port.
"""

import argparse
import concurrent.futures
import http.server
import json
import pathlib
import queue
import threading
import time
from typing import Any

import tensorflow as tf

PREDICT = "/v1/models/model:predict"
STATUS = "/v1/models/model"
Instance = dict[str, Any]


class Model:
    """A model in use, which takes deltas while it answers.

    Args:
        folder: of the SavedModel.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.loaded = tf.saved_model.load(str(folder))
        self.predict = self.loaded.signatures["serving_default"]
        _, self.inputs = self.predict.structured_input_signature
        self.delta = 0
        # When its last numbers were, in seconds since 1970.
        self.written = (folder / "saved_model.pb").stat().st_mtime
        self.delays: list[float] = []  # from a delta's writing to its use
        self.ages: list[float] = []  # of the numbers that a delta replaced
        self.waiting: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self.answer, daemon=True).start()

    def ask(self, instances: list[Instance]) -> list[Any]:
        """The predictions of some instances."""
        future: concurrent.futures.Future[list[Any]]
        future = concurrent.futures.Future()
        self.waiting.put((instances, future))
        return future.result()

    def answer(self) -> None:
        """Answers whoever waits, all at once."""
        while True:
            asked = [self.waiting.get()]
            while not self.waiting.empty():
                asked.append(self.waiting.get())
            try:
                found = self.run([i for some, _ in asked for i in some])
            except Exception:  # of one of them: each by itself
                for some, future in asked:
                    try:
                        future.set_result(self.run(some))
                    except Exception as error:
                        future.set_exception(error)
                continue
            for some, future in asked:
                future.set_result([found.pop(0) for _ in some])

    def run(self, instances: list[Instance]) -> list[Any]:
        """The predictions of a batch."""
        given = {
            name: tf.constant([each[name] for each in instances], spec.dtype)
            for name, spec in self.inputs.items()
        }
        outputs = {k: v.numpy() for k, v in self.predict(**given).items()}
        if len(outputs) == 1:
            return next(iter(outputs.values())).tolist()
        return [
            {name: value[row].tolist() for name, value in outputs.items()}
            for row in range(len(instances))
        ]

    def follow(self, folder: pathlib.Path) -> None:
        """Applies deltas `1`, `2` and so on of a folder as they come."""
        while True:
            path = folder / str(self.delta + 1)
            if not path.exists():
                time.sleep(0.01)
                continue
            told = self.loaded.apply_delta(str(path))
            now, written = time.time(), int(told["microseconds"]) / 1e6
            self.ages.append(now - self.written)
            self.delays.append(now - written)
            self.delta, self.written = int(told["number"]), written


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"  # many requests over a connection
    disable_nagle_algorithm = True
    model: Model

    def do_POST(self) -> None:
        """Predicts."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != PREDICT:
            return self.reply(404, {"error": f"POST to {PREDICT}"})
        try:
            found = self.model.ask(json.loads(body)["instances"])
        except Exception as error:
            return self.reply(
                400, {"error": f"{type(error).__name__}: {error}"}
            )
        return self.reply(200, {"predictions": found})

    def do_GET(self) -> None:
        """Tells which numbers are in use."""
        if self.path != STATUS:
            return self.reply(404, {"error": f"GET {STATUS}"})
        model = self.model
        return self.reply(
            200,
            {
                "delta": model.delta,
                "age": time.time() - model.written,
                "ages": model.ages,
                "delays": model.delays,
            },
        )

    def reply(self, code: int, content: dict[str, Any]) -> None:
        """Sends JSON."""
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing: a line for each request would be most of the work."""


class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=pathlib.Path, help="of the SavedModel")
    add("--port", type=int, default=8501, help="0 for any")
    add("--deltas", type=pathlib.Path, help="folder of deltas to follow")
    arguments = parser.parse_args()
    Handler.model = model = Model(arguments.folder)
    if arguments.deltas:
        follow = threading.Thread(
            target=model.follow, args=(arguments.deltas,), daemon=True
        )
        follow.start()
    server = Server(("127.0.0.1", arguments.port), Handler)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
