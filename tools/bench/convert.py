"""Time and memory of a conversion, both ways, against copying the same bytes.

    python tools/bench/convert.py --gigabytes 4 [--workers 2] [--folder /big/disk]

Makes a Llama of that size with random bits in bfloat16, converts it to Megatron and back in
processes of their own, and compares all bits. Each process is asked for its peak memory (resident,
files included). Copying is what a script would do: read, write, flush to the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, WIDE, HEADS, KV_HEADS, VOCAB = 2048, 8192, 32, 8, 128_256
ROOT = Path(__file__).parents[2]
_MEASURED = """
import resource, sys
from pathlib import Path
from megappo.cli import main
code = main(sys.argv[1:])
status = Path("/proc/self/status").read_text().split()
own = int(status[status.index("VmHWM:") + 1])
print("PEAK", own * 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
sys.exit(code)
"""
# VmHWM, since ru_maxrss of a process counts what the one that started it had; workers have no
# larger one to inherit from than the process that is measured.


def main() -> int:
    """Prints a table; returns 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="where to work; a temporary folder if not given"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        root = Path(name)
        size = make_model(root / "hf", int(args.gigabytes * 10**9))
        print(f"model      {size / 1e9:.2f} GB, bfloat16, {args.workers} workers", flush=True)
        more = ["--workers", str(args.workers)]
        for what, command in (
            ("to-megatron", [root / "hf", root / "megatron", *more]),
            ("to-hf", [root / "megatron", root / "back", "--like", root / "hf", *more]),
        ):
            # Before each, since other work on the machine changes what a disk gives.
            copied_s = copy(root / "hf", root / "copy")
            report("copy", copied_s, size, copied_s, None)
            shutil.rmtree(root / "copy")
            elapsed_s, peak = measure([what, *map(str, command)])
            report(what, elapsed_s, size, copied_s, peak)
        done = subprocess.run(
            [sys.executable, "-m", "megappo.cli", "convert", "verify", root / "hf", root / "back"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        print(f"verify     {done.stdout.strip().splitlines()[-1]}")
        return done.returncode


def make_model(folder: Path, num_bytes: int) -> int:
    """Writes a Llama with random bits in files of at most 1 GB; returns its size."""
    folder.mkdir()
    kv = HIDDEN // HEADS * KV_HEADS
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    layer_bytes = sum(2 * torch.Size(shape).numel() for shape in layer.values())
    num_layers = max(1, (num_bytes - 2 * VOCAB * HIDDEN) // layer_bytes)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(num_layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return _write_shards(folder, shapes)


def _write_shards(folder: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    weight_map: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    total = 0
    for i, (name, shape) in enumerate(shapes.items()):
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16)
        pending[name] = bits.view(torch.bfloat16)
        total += bits.nbytes
        if sum(t.nbytes for t in pending.values()) > 5 * 10**8 or i == len(shapes) - 1:
            file = f"model-{len(set(weight_map.values())):05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(pending, file)
            pending.clear()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def copy(source: Path, out: Path) -> float:
    """Seconds to copy a folder by reading, writing and flushing."""
    started = time.perf_counter()
    out.mkdir()
    buffer = bytearray(2**24)
    for path in source.iterdir():
        with path.open("rb", buffering=0) as read, (out / path.name).open("wb") as write:
            while count := read.readinto(buffer):
                write.write(memoryview(buffer)[:count])
            write.flush()
            os.fsync(write.fileno())
    return time.perf_counter() - started


def measure(arguments: list[str]) -> tuple[float, int]:
    """Seconds of a command without the start of Python, and the largest process's peak in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, "convert", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    (line,) = (line for line in lines if line.startswith("done "))
    (peak,) = (line.split()[1:] for line in lines if line.startswith("PEAK"))
    return float(line.split(", ")[1].split()[0]), max(map(int, peak))


def report(what: str, elapsed_s: float, size: int, copied_s: float, peak: int | None) -> None:
    """A line of the table."""
    memory = "" if peak is None else f", peak {peak / 2**20:.0f} MiB"
    print(
        f"{what:<11}{elapsed_s:6.1f} s, {size / elapsed_s / 1e6:5.0f} MB/s, "
        f"{elapsed_s / copied_s:.2f} x copying{memory}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
