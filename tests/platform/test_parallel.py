"""Ranks as real processes on gloo: what they compute together, and what is left when one of them dies."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gearshift.platform.engine.local import load_engine
from gearshift.platform.engine.parallel import Place, pack, share_of, unpack
from gearshift.platform.engine.rows import Rows
from gearshift.platform.engine.runner import Loaded
from gearshift.platform.errors import ConfigError

spec = importlib.util.spec_from_file_location("ranks_script", Path(__file__).with_name("ranks.py"))
assert spec
assert spec.loader
script: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

RANKS, VOCAB = script.RANKS, script.VOCAB


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.integers(0, 5), st.randoms(use_true_random=False))
def test_rows_come_out_as_they_went_in(t: int, s: int, w: int, n: int, rng: random.Random) -> None:
    def some(*shape: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([rng.randrange(1 << 40) for _ in range(int(np.prod(shape)))], np.int64).reshape(shape)

    rows = Rows(some(t), some(t), some(t), some(s, w), some(s), some(s), some(s), some(n))
    for before, after in zip(rows, unpack(pack(rows)), strict=True):
        assert before.shape == after.shape
        assert (before == after).all()


def test_heads_that_can_not_be_shared_name_the_possible_ranks() -> None:
    from transformers import LlamaConfig

    config: Any = LlamaConfig(num_attention_heads=12, num_key_value_heads=6, hidden_size=96, intermediate_size=192)
    mine = share_of(config, 3)
    assert (mine.num_attention_heads, mine.num_key_value_heads, mine.head_dim) == (4, 2, 8)
    assert config.num_attention_heads == 12
    with pytest.raises(ConfigError, match=r"tensor_parallel: 4 does not divide .* possible are 1, 2, 3, 6"):
        share_of(config, 4)


def tiny(path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, eos_token_id=2, bos_token_id=1, pad_token_id=0,
        initializer_range=0.4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """Words `t0` to `t255`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t2").save_pretrained(path)


def test_ranks_say_what_one_says_and_a_dead_one_ends_all_requests_at_once(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model")
    alone = load_engine(path, script.settings(tensor_parallel=1))
    asked = script.requests(12)

    async def one() -> list[str]:
        said: list[str] = await script.answers(alone, asked)
        await alone.close()
        return said

    expected = asyncio.run(one())
    assert len({len(text) for text in expected}) > 1
    place = Place(0, RANKS, str(tmp_path / "meeting"))
    with ranks(path, place) as (said, follower):
        assert next(said) == expected
        stats = next(said)
        assert stats["kv_blocks_used"] == 0
        assert stats["preemptions"] > 0
        assert next(said) == "streaming"
        follower.send_signal(signal.SIGKILL)
        failed = next(said)
        assert failed == {"messages": ["The model's engine has stopped."] * 4, "healthy": False}


def test_the_first_rank_lets_the_others_go(tmp_path: Path) -> None:
    with ranks(tiny(tmp_path / "model"), Place(0, RANKS, str(tmp_path / "meeting"))) as (said, follower):
        assert [next(said) for _ in range(3)][2] == "streaming"
        said.close()  # the leader's turn to end
        assert follower.wait(30) == 0


def kill(started: list[subprocess.Popen[str]]) -> None:
    for process in started:
        process.kill()


@contextmanager
def ranks(path: Path, place: Place) -> Iterator[tuple[Generator[Any, None, None], subprocess.Popen[str]]]:
    """Both ranks as processes, and what the first one says, a line of JSON each."""
    script, arguments = Path(__file__).with_name("ranks.py"), [str(path), place.meeting]
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(RANKS)
    ]
    leader, follower = started
    watchdog = threading.Timer(120, lambda: kill(started))
    watchdog.start()

    def said() -> Generator[Any, None, None]:
        assert leader.stdout is not None
        assert leader.stdin is not None
        try:
            for line in leader.stdout:
                if line.startswith("{") or line.startswith("[") or line.startswith('"'):
                    yield json.loads(line)
        finally:
            leader.stdin.close()

    lines = said()
    try:
        yield lines, follower
        lines.close()
        assert leader.wait(30) == 0
    finally:
        watchdog.cancel()
        kill(started)
        for process in started:
            process.wait(10)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def test_a_share_takes_its_share_of_the_cache(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model")
    whole = Loaded(path, script.settings(tensor_parallel=1))
    assert whole.block_bytes == 2 * 3 * 2 * 32 * 4 * 16
