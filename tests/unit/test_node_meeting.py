"""Nodes meet over real sockets: all there and alike, or one message for all."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megappo.distributed.node_facts import NodeFacts
from megappo.distributed.node_meeting import meet
from megappo.errors import NodesMissingError, UserError

HERE = "127.0.0.1"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]


def node(number, host="", **settings):
    return NodeFacts(
        node=number, host=host or f"h{number}", address=HERE, settings={"lr": "1", **settings}
    )


def gather(nodes, port, *, num_nodes=None, wait_s=10.0):
    """What came of it for each node: an id, or the error."""

    def one(facts):
        try:
            return meet(facts, ip=HERE, port=port, num_nodes=num_nodes or len(nodes), wait_s=wait_s)
        except (UserError, NodesMissingError) as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(one, nodes))


def test_all_nodes_get_one_id_and_the_port_is_free_again(port):
    first = gather([node(i) for i in (2, 0, 1)], port)
    assert len(set(first)) == 1
    assert isinstance(first[0], str)
    assert len(first[0]) == 16
    second = gather([node(0), node(1)], port)
    assert second[0] == second[1] != first[0]


def test_one_node_alone_needs_nobody(port):
    assert gather([node(0)], port)[0]


def test_nodes_that_differ_all_end_with_the_same_words(port):
    found = gather([node(0), node(1), node(2, lr="2")], port)
    assert all(isinstance(error, UserError) for error in found)
    assert len({str(error) for error in found}) == 1
    assert "lr: node 2 (h2, 127.0.0.1) has 2; the other 2 nodes have 1" in str(found[0])


def test_a_missing_node_is_named_to_those_that_came(port):
    found = gather([node(0), node(2)], port, num_nodes=4, wait_s=3)
    assert all(isinstance(error, NodesMissingError) for error in found)
    assert "2 of 4 nodes did not come within 3 s" in str(found[0])
    assert "with NODE_RANK 1, 3; there were node 0 (h0, 127.0.0.1), node 2" in str(found[0])
    assert str(found[0]) == str(found[1])


def connect(port):
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((HERE, port), timeout=60)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def come_and_end(facts, port):
    """A node's process that ends in the meeting; back when node 0 knows."""
    with connect(port) as connection:
        connection.sendall(f"megappo nodes 1 : {facts.to_json()}\n".encode())
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""


def test_a_node_that_ends_in_the_meeting_can_come_again(port):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: gather([node(0)], port, num_nodes=3, wait_s=60)[0])
        come_and_end(node(1), port)
        others = gather([node(1, host="again"), node(2)], port, num_nodes=3)
        assert isinstance(first.result(), str)
        assert {first.result()} == set(others)


def test_a_node_that_ended_in_the_meeting_is_named_and_not_counted(port):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lambda: gather([node(0)], port, num_nodes=3, wait_s=1)[0])
        come_and_end(node(1), port)
        (third,) = gather([node(2)], port, num_nodes=3)
        error = first.result()
    assert isinstance(error, NodesMissingError)
    assert "1 of 3 nodes did not come within 1 s" in str(error)
    assert "node 2 (h2, 127.0.0.1); node 1 (h1, 127.0.0.1) came and ended: look" in str(error)
    assert str(third) == str(error)


@pytest.mark.parametrize("has_read", [True, False])
def test_when_node_0_ends_before_its_verdict_the_others_say_so(port, has_read):
    def end(listener):
        connection, _ = listener.accept()
        with connection:
            if has_read:
                connection.makefile("r").readline()

    with socket.create_server((HERE, port)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(end, listener)
        (error,) = gather([node(1)], port, num_nodes=2, wait_s=60)
    assert isinstance(error, NodesMissingError)
    assert f"listens on 127.0.0.1:{port}, ended before its verdict" in str(error)


def test_without_node_0_the_others_say_where_they_looked(port):
    (error,) = gather([node(1)], port, num_nodes=2, wait_s=0.5)
    assert isinstance(error, NodesMissingError)
    assert f"could not reach node 0 at 127.0.0.1:{port}" in str(error)
    assert "refused" in str(error)


def test_a_number_that_two_nodes_have_is_an_error_on_all(port):
    found = gather([node(0), node(1, host="a"), node(1, host="b")], port)
    assert all(isinstance(error, UserError) for error in found)
    assert "NODE_RANK 1 is given twice" in str(found[0])


def test_a_port_in_use_is_named(port):
    with socket.create_server((HERE, port)):
        (error,) = gather([node(0)], port, num_nodes=2, wait_s=0.5)
    assert isinstance(error, UserError)
    assert f"MASTER_PORT {port} is in use on node 0 (h0, 127.0.0.1)" in str(error)


def test_an_address_of_another_machine_is_named(port):
    with pytest.raises(UserError, match=r"MASTER_ADDR \(192\.0\.2\.7\) is not an address of this"):
        meet(node(0), ip="192.0.2.7", port=port, num_nodes=2, wait_s=0.5)


def test_something_else_on_the_port_is_no_node(port):
    def serve(listener):
        connection, _ = listener.accept()
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    with socket.create_server((HERE, port)) as listener:
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        (error,) = gather([node(1)], port, num_nodes=2, wait_s=5)
        thread.join()
    assert isinstance(error, UserError)
    assert f"what listens on 127.0.0.1:{port} is not node 0 of this run" in str(error)


def test_strangers_do_not_disturb_the_meeting(port):
    def disturb():
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"megappo nodes 1 : {}\n", b"x" * 2**21, b""):
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection((HERE, port), timeout=1) as connection:
                        connection.sendall(text)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
                except ConnectionError:
                    break

    def late():
        time.sleep(0.5)
        return gather([node(1)], port, num_nodes=2)[0]

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(lambda: gather([node(0)], port, num_nodes=2)[0])
        pool.submit(disturb)
        second = pool.submit(late)
        assert first.result() == second.result()
        assert isinstance(first.result(), str)
