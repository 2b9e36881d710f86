import json
import os
import pty
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from rlctl.models import facts, model_sizes
from tests.unit.cli.conftest import Rlctl


def test_preview_shows_text_what_is_trained_on_lengths_and_packs(rlctl: Rlctl) -> None:
    out = rlctl("data", "preview", "sft-tiny", "--samples", "2", "trainer.micro_batch_tokens=100").out
    first, tokens, ends, trained, packs, *texts = out.splitlines()
    assert first == f"{RECIPES / 'tiny-data/sft.jsonl'}: 4,600 rows; none cut; longest 9 tokens"
    assert tokens.startswith("tokens   39,452; a row has 8.577 on average, 9 at the median")
    assert ends == "ends     <eos> 1 (generation_config.json, config.json, tokenizer)"
    assert trained == "trained  34.7% of the tokens"
    assert packs.startswith("packs    6 micro-batches a rank and step, 91% full") and packs.endswith("200 steps")
    assert [line for line in texts if "=" in line] == ["35+11={+64<eos>+}", "7+26={+33<eos>+}"]


def test_preview_in_numbers_and_what_is_cut(rlctl: Rlctl) -> None:
    done = rlctl("data", "preview", "sft-tiny", "model.max_length=8", "--json")
    summary = json.loads(done.out)
    assert 0 < summary["truncated"] < summary["rows"] == 4600
    assert summary["longest"] == 9 and summary["lengths"]["longest"] == 8
    assert summary["packing"]["steps"] == 200 and summary["packing"]["micro_batches"] == 1


def test_preview_of_prompts(rlctl: Rlctl) -> None:
    lines = rlctl(
        "data", "preview", "grpo-tiny", "--validation", "--samples", "1", "data.shuffle=false"
    ).out.splitlines()
    assert lines[0].endswith("validation.jsonl: 200 rows; none cut; longest 6 tokens")
    assert lines[-1].startswith("answer: ") and lines[-2].endswith("=")


@pytest.mark.long  # 3 s of CPU: the agent's process imports the tokenizer's library
def test_preview_of_an_agent_shows_the_first_prompt_that_it_writes(rlctl: Rlctl) -> None:
    done = rlctl("data", "preview", "calculator-agent-tiny")
    prompt = "Compute 99 - 55 * 7. Use the tool calculate, then give the result to the tool answer."
    system_message = "<|system|>Tools: answer(value), calculate(expression).<|end|>"
    assert done.out.splitlines()[-1] == f"{system_message}<|user|>{prompt}<|end|><|assistant|>"
    assert "made-up turns: requests 1" in done.err


def test_preview_derives_the_facts_of_a_model_that_no_run_has_seen(
    rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    # The real function looks into the cache. The fixture of all tests knows every model.
    monkeypatch.setattr(model_sizes, "known_facts", facts.known_facts)
    done = rlctl("data", "preview", "sft-tiny", "--json", "data.train.limit=5")
    assert (done.code, json.loads(done.out)["rows"]) == (0, 5), done.err


def test_preview_starts_nothing_so_that_a_run_of_that_name_may_exist(rlctl: Rlctl, home: Path) -> None:
    (home / "runs/mine").mkdir(parents=True)
    assert rlctl("data", "preview", "grpo-tiny", "run.name=mine").code == 0


def test_preview_cuts_long_text_and_says_what_it_cannot_show(rlctl: Rlctl) -> None:
    assert "{+6+}..." in rlctl("data", "preview", "--samples", "1", "--tokens", "7").out
    done = rlctl("data", "preview", "sft-tiny", "--validation", "data.validation.path=null")
    assert (done.code, done.err.splitlines()[0]) == (
        2,
        "error: data.validation.path: is null: there is nothing to show",
    )
    done = rlctl("data", "preview", "sft-tiny", "data.train.answer_key=reply")
    assert done.code == 2 and "reply" in done.err


def test_a_terminal_sees_what_is_read_and_a_pipe_does_not(
    rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "few.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    command = ("data", "preview", "sft-tiny", "--json", "data.train.path=few.jsonl")
    assert rlctl(*command).err == ""
    screen_file, terminal_file = pty.openpty()
    screen = bytearray()

    def read_screen() -> None:
        """Read until the terminal is closed: a terminal that nobody reads is full after 4 KiB."""
        with suppress(OSError):  # EIO, once it is closed
            while chunk := os.read(screen_file, 1 << 16):
                screen.extend(chunk)

    reader = threading.Thread(target=read_screen)
    reader.start()
    with open(terminal_file, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        done = rlctl(*command)
    reader.join()
    os.close(screen_file)
    assert (done.code, b"reading " in screen) == (0, True), bytes(screen)
