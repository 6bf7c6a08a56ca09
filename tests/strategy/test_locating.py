# SPDX-License-Identifier: Apache-2.0
"""Ranks that know only where the first one listens learn where all are."""

import concurrent.futures
import dataclasses
import http.server
import socket
import threading
import time

import pytest

from tfdist_ext.launch.launched import Launched
from tfdist_ext.strategy import bootstrap
from tfdist_ext.strategy import cluster as cluster_lib


def cluster(rank, size, master, local_size):
    launched = Launched("srun", rank, size, 0, local_size, master, "7.0", "")
    return cluster_lib.Cluster(
        {"worker": launched.names}, "worker", rank, launched
    )


@pytest.fixture(autouse=True)
def given(monkeypatch):
    """What a test gives as resolver is what was read."""
    monkeypatch.setattr(cluster_lib, "read", lambda given: given)
    # Not of this process, which other tests share.
    monkeypatch.setattr(bootstrap, "take_share_of_host", lambda _: None)
    monkeypatch.delenv("TFDIST_SECRET", raising=False)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize("size", [2, 11])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_all_ranks_know_all_addresses(size, host):
    port = free_port()
    given = [cluster(r, size, f"{host}:{port}", 1) for r in range(size)]
    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        found = list(
            threads.map(lambda each: bootstrap.locate(each, 20), given)
        )
    expected = [f"127.0.0.1:{port + rank}" for rank in range(size)]
    for rank, (resolver, located) in enumerate(found):
        assert located.addresses == expected
        assert located.rank == rank
        assert resolver.cluster_spec().as_dict() == {"worker": expected}
        assert (resolver.task_type, resolver.task_id) == ("worker", rank)


@pytest.fixture
def store():
    """The address of a store like that of horovodrun."""
    kept = {}

    class Store(http.server.BaseHTTPRequestHandler):
        def do_PUT(self):
            length = int(self.headers["Content-Length"])
            kept[self.path] = self.rfile.read(length)
            self.send_response(200)
            self.end_headers()

        def do_GET(self):
            self.send_response(200 if self.path in kept else 404)
            self.end_headers()
            self.wfile.write(kept.get(self.path, b""))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_store_tells_where_rank_0_is(store):
    def locate(rank):
        time.sleep(0.3 if rank == 0 else 0)  # the others have to wait
        given = cluster(rank, 3, f":{port}", 1)
        launched = dataclasses.replace(given.launched, store=store)
        given = dataclasses.replace(given, launched=launched)
        return bootstrap.locate(given, 20)[1].addresses

    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = list(threads.map(locate, range(3)))
    assert found == [[f"127.0.0.1:{port + rank}" for rank in range(3)]] * 3


def test_a_store_that_does_not_tell_is_named(store):
    where = bootstrap.addresses_lib.split(store)
    with pytest.raises(RuntimeError, match=r"rank 0 did not write.*=0\.2 s"):
        bootstrap.get_text(where, 0.2)
    nobody = ("127.0.0.1", free_port())
    for ask in (
        lambda: bootstrap.get_text(nobody, 1),
        lambda: bootstrap.put_text(nobody, "n9"),
    ):
        with pytest.raises(RuntimeError, match=r"cannot be used.*MASTER_ADDR"):
            ask()


def test_ranks_of_another_job_are_unauthenticated():
    master = f"127.0.0.1:{free_port()}"
    first = cluster(0, 2, master, 2)
    other = Launched("srun", 1, 2, 1, 2, master, "8.0", "")
    second = cluster_lib.Cluster({"worker": other.names}, "worker", 1, other)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        meeting = threads.submit(bootstrap.locate, first, 2)
        with pytest.raises(RuntimeError, match="another job"):
            bootstrap.locate(second, 2)
        with pytest.raises(RuntimeError, match="process 1 of srun, job 7"):
            meeting.result()


def test_rank_0_says_that_others_would_not_reach_it(monkeypatch):
    # TEST-NET-1, nobody's address.
    with pytest.raises(ValueError, match=r"not an address of its.*MASTER_ADDR"):
        bootstrap.locate(cluster(0, 2, "192.0.2.7:7000", 1), 1)
    with pytest.raises(ValueError, match="cannot be resolved"):
        bootstrap.locate(cluster(1, 2, "no.such.host.invalid:7000", 1), 1)
    # Debian's own name for a host in its /etc/hosts.
    monkeypatch.setattr(
        bootstrap.addresses_lib, "bind_address", lambda _: "127.0.1.1"
    )
    with pytest.raises(ValueError, match=r"'n9'.*127\.0\.1\.1.*MASTER_ADDR"):
        bootstrap.locate(cluster(0, 2, "n9:7000", 1), 1)
