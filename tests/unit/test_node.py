"""launch/node.sh's variables: nothing is guessed, and all that is wrong is said at once."""

import re
import socket

import pytest

from megappo import node
from megappo.distributed.environment import LaunchEnvironment, check_slurm_nodes, read_slurm_nodes
from megappo.distributed.node_network import interface_towards, is_loopback, resolve
from megappo.errors import EXIT_USAGE, UserError

GOOD = {
    "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    "GPUS_PER_NODE": "8",
}  # fmt: skip


def test_good_variables_are_read():
    place = node.Place.read(GOOD | {"MAX_RESTARTS": "3"})
    assert (place.num_nodes, place.node, place.ranks, place.max_restarts) == (2, 1, 8, 3)
    assert (place.address, place.port) == ("10.0.0.1", 29500)


def test_every_missing_variable_is_named_with_its_meaning():
    with pytest.raises(UserError) as error:
        node.Place.read({"NNODES": "2", "MASTER_ADDR": " "})
    for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GPUS_PER_NODE"):
        assert f"  {name}: {node.VARIABLES[name]}" in str(error.value)
    assert "  NNODES:" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"NNODES": "two"}, "NNODES is 'two', which is no number"),
        ({"NODE_RANK": "-1"}, "NODE_RANK is '-1', which is no number"),
        ({"NODE_RANK": "2"}, "NODE_RANK is 2 and NNODES 2: nodes are numbered from 0 to 1"),
        ({"NNODES": "0"}, "NNODES is 0; it must be 1 or more"),
        ({"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE is 0; it must be 1 or more"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000; ports go from 1 to 65535"),
        ({"MAX_RESTARTS": "x"}, "MAX_RESTARTS is 'x', which is no number"),
    ],
)
def test_impossible_values_are_named(change, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        node.Place.read(GOOD | change)


@pytest.mark.parametrize("address", ["localhost", "127.0.1.1", "::1", "0.0.0.0"])
def test_several_nodes_do_not_meet_at_localhost(address, monkeypatch, capsys):
    for name, value in (GOOD | {"MASTER_ADDR": address}).items():
        monkeypatch.setenv(name, value)
    assert node.main(["no.yaml"]) == EXIT_USAGE
    assert "each node would find itself there" in capsys.readouterr().err


def test_a_name_that_leads_nowhere_is_an_error():
    with pytest.raises(UserError, match=r"MASTER_ADDR is 'no-such.invalid', which .* cannot res"):
        resolve("no-such.invalid")


def test_loopback_is_known_in_both_families():
    assert is_loopback("127.0.1.1")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("fe80::1%eth0")


def test_the_way_to_localhost_is_no_way_to_other_nodes(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(UserError, match="which is no address that other nodes reach"):
        interface_towards("127.0.0.1")


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(
        UserError, match=f"'nosuch0', which has no address on {socket.gethostname()}"
    ):
        interface_towards("192.0.2.1")


def test_a_run_of_one_node_in_a_slurm_step_of_two_is_refused(monkeypatch):
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)
    assert read_slurm_nodes() == 1
    monkeypatch.setenv("SLURM_NNODES", "2")
    assert LaunchEnvironment.read().slurm_nodes == 2
    with pytest.raises(UserError, match="run of one node, in a Slurm step of 2"):
        check_slurm_nodes(1, read_slurm_nodes())
    check_slurm_nodes(2, 2)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")  # srun --nodes=1 in a job of two
    check_slurm_nodes(1, read_slurm_nodes())


def test_torchrun_tells_the_node_and_their_number(monkeypatch):
    values = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    launch = LaunchEnvironment.read()
    assert (launch.num_nodes, launch.node) == (2, 1)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")  # nodes with different numbers of ranks
    monkeypatch.setenv("GROUP_RANK", "2")
    launch = LaunchEnvironment.read()
    assert (launch.num_nodes, launch.node) == (3, 2)


@pytest.mark.parametrize("task", ["rm", "sft"])
def test_a_node_tells_the_config_of_any_task(task, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"task: {task}\nmodel: {{path: m}}\n"
        "data: {train_files: [a.parquet], val_files: [b.parquet], max_length: 96}\n"
        "trainer: {node_wait_s: 7}\n"
    )
    facts, wait_s = node._facts(node.Place.read(GOOD), "10.0.0.2", [str(path), "trainer.seed=5"])
    assert facts.problem == ""
    assert wait_s == 7
    told = {key: facts.settings[key] for key in ("task", "data.max_length", "trainer.seed")}
    assert told == {"task": f'"{task}"', "data.max_length": "96", "trainer.seed": "5"}


def test_nodes_wait_in_the_rendezvous_little_longer_than_in_the_meeting(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_STEP_NUM_NODES", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = node.Place(num_nodes=1, node=0, address="127.0.0.1", port=port, ranks=1, max_restarts=0)
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {path: m}\ndata: {train_files: [t], val_files: [t]}\ntrainer: {node_wait_s: 7.5}\n"
    )
    assert "--rdzv-conf=is_host=true,join_timeout=68" in node._prepare(place, [str(config)])
