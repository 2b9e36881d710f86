"""Folders of models and adapters with odd values: a check and a dry run end in a line each, never in a traceback."""

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.models import facts
from rlctl.models.adapters import AdapterSpec
from rlctl.models.derive import load_facts
from tests.tiny_models import make_model
from tests.unit.cli.conftest import Rlctl
from tests.unit.folders import SFT
from tests.unit.models.test_adapter_folder import make_adapter

INFINITE, HUGE = float("inf"), 10**30
VALUES: list[Any] = [
    *(None, True, -1, 0, 0.5, 3, 1 << 40, HUGE, INFINITE, float("nan")),
    *("", "odd", "\x1b[31mred", "a" * 1000, [], {}, [INFINITE], [[1]], {"a": [None]}, ["x", 1]),
]
TEXTS = [b"", b"[]", b"null", b"3", b'{"a":', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 400 + b"1" + b"}" * 400]
# File -> number of its mutations. Templates of chats are a test's own.
COUNTS = {
    "model/config.json": 60,
    "model/generation_config.json": 30,
    "model/tokenizer.json": 40,
    "model/tokenizer_config.json": 40,
    "model/model.safetensors": 60,
    "model/model.safetensors.index.json": 30,
    "adapter/adapter_config.json": 60,
    "adapter/adapter_model.safetensors": 40,
    "adapter/rlctl_base.json": 10,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a file that an index lists, and an adapter."""
    root = tmp_path_factory.mktemp("good")
    model = make_model(root / "model", "qwen3", hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    linears = load_facts(model).sizes.linears
    make_adapter(root / "adapter", model, AdapterSpec(2, 4.0, False, 0.0, linears[:2]))
    names = json.loads((model / "model.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}").keys()
    index = {"weight_map": dict.fromkeys(set(names) - {"__metadata__"}, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def mutated(value: Any, rng: random.Random) -> tuple[str, bytes]:
    """Return a change in words, and the JSON text after it."""
    if rng.random() < 0.1:
        text = rng.choice(TEXTS)
        return str(text[:20]), text
    value = json.loads(json.dumps(value))
    # A key of the outermost object is as likely as all that is deeper.
    found = list(places(value)) if rng.random() < 0.5 else [(key,) for key in value]
    *above, last = rng.choice([path for path in found if path[-1] != "chat_template"])
    owner = value
    for key in above:
        owner = owner[key]
    if rng.random() < 0.15:
        del owner[last]
        return f"without {above} {last}", json.dumps(value).encode()
    owner[last] = rng.choice(VALUES)
    return f"{above} {last}: {owner[last]!r:.40}", json.dumps(value).encode()


def mutated_weights(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Return a change in words, and the changed safetensors file: mostly of its header."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2:
        cut = rng.randrange(len(data))
        odd = rng.choice([data[:cut], rng.randbytes(8) + data[8:], data + b"\0", data[:8] + rng.randbytes(length)])
        return f"{len(odd)} of {len(data)} bytes", odd
    words, header = mutated(json.loads(data[8 : 8 + length]), rng)
    return words, len(header).to_bytes(8, "little") + header + data[8 + length :]


@pytest.mark.parametrize("name", COUNTS)
def test_generated_folders_end_in_a_line(
    name: str, good: Path, rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process: another process takes seconds.
    monkeypatch.setattr(facts, "derive_apart", load_facts)
    monkeypatch.setattr("rlctl.models.model_sizes.find_facts", load_facts)
    shutil.rmtree(home / "model")
    shutil.copytree(good, home, dirs_exist_ok=True)
    config = home / "adapter/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(home / "model")}))
    own = (
        ["model.path=adapter", "lora={rank: 2, alpha: 4, targets: [q_proj, k_proj]}"]
        if name.startswith("adapter")
        else []
    )
    (home / "sft.recipe.yaml").write_text(SFT)
    file, ended = home / name, list[int]()
    before, rng = file.read_bytes(), random.Random(name)
    for number in range(COUNTS[name] + 1):
        change = "none", before
        if number:
            change = mutated_weights(before, rng) if file.suffix == ".safetensors" else mutated(json.loads(before), rng)
        file.write_bytes(change[1])
        for command in (("config", "check"), ("train", "sft", "--dry-run")):
            load_tokenizer.cache_clear()
            try:
                done = rlctl(*command, "sft.recipe.yaml", *own)
            except Exception as error:
                raise AssertionError(f"{change[0]}: {command}: {error!r}") from error
            errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
            assert done.code == (2 if errors else 0), (change[0], command, done)
            assert all(len(line) < 1000 and line.isprintable() for line in errors), errors
            ended.append(done.code)
    assert ended[:2] == [0, 0], done
    assert 2 in ended or name.endswith("rlctl_base.json")


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        (
            "model/generation_config.json",
            "eos_token_id",
            [INFINITE],
            "eos_token_id is Infinity; allowed: a whole number",
        ),
        ("model/config.json", "num_hidden_layers", HUGE, "num_hidden_layers is 1e.30; allowed: at most 100,000"),
        ("adapter/adapter_config.json", "r", INFINITE, "r is Infinity; allowed: a whole number from 1 to 1,000,000"),
        ("adapter/adapter_config.json", "lora_alpha", 10**400, "lora_alpha is 1000.*; allowed: a number from 0 to 1"),
        ("adapter/adapter_config.json", "lora_alpha", float("nan"), "lora_alpha is NaN; allowed: a number from 0 to 1"),
        (
            "adapter/adapter_config.json",
            "lora_dropout",
            "some",
            'lora_dropout is "some"; allowed: a number from 0 to 1',
        ),
        ("model/model.safetensors.index.json", "weight_map", {"a": "../b"}, "lists ../b, which is outside its folder"),
    ],
)
def test_an_odd_value_is_named_with_its_file_and_what_is_allowed(
    name: str, key: str, value: Any, said: str, good: Path, rlctl: Rlctl, home: Path
) -> None:
    shutil.rmtree(home / "model")
    shutil.copytree(good, home, dirs_exist_ok=True)
    file = home / name
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    done = rlctl("train", "sft", "--dry-run", "sft.recipe.yaml", f"model.path={name.partition('/')[0]}")
    assert done.code == 2 and re.search(rf"{re.escape(str(file))}[: ].*{said}", done.err), done.err


REFUSED = r"the chat template refuses the row: {}; set another data\.chat_template"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no \x1b[31m') }}", REFUSED.format(r"no \u241b\[31m")),
        ("{{ messages + 1 }}", REFUSED.format("can only concatenate list .*")),
        ("{% for \x1b[31m %}", REFUSED.format("unexpected char .*")),
        (["a", "b"], "tokenizer_config.json: chat_template must be text, or a list of {name"),
        (5, "the tokenizer's chat_template is no text, nor texts by name; set data.chat_template"),
        ({"default": 5}, "the tokenizer's chat_template is no text, nor texts by name; set data.chat_template"),
    ],
)
def test_an_odd_chat_template_ends_each_command_in_one_line_that_names_it(
    template: Any, said: str, rlctl: Rlctl, home: Path
) -> None:
    file = home / "model/tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    for command in (
        "config check sft.recipe.yaml",
        "data preview grpo.recipe.yaml",
        "train grpo --dry-run grpo.recipe.yaml",
        "train sft --dry-run sft.recipe.yaml",
        "eval model grpo.recipe.yaml --data train.jsonl",
    ):
        load_tokenizer.cache_clear()
        done = rlctl(*command.split())
        errors = [line for line in done.err.splitlines() if "problem" not in line]
        assert done.code == 2 and len(errors) == 1 and errors[0].isprintable(), (command, done)
        assert re.search(said, errors[0]), (command, done)


def with_zero_adapters(adapter: Path) -> Path:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: torch.zeros_like(each) for name, each in tensors.items()}, adapter / "adapter_model.safetensors")
    return adapter


def test_an_adapter_of_zeros_is_refused_by_name(good: Path, rlctl: Rlctl, home: Path) -> None:
    shutil.copytree(good / "adapter", home / "adapter")
    done = rlctl("model", "check", str(with_zero_adapters(home / "adapter")))
    assert done.code == 2
    assert "A and B of model.layers.0.self_attn.q_proj are all zero, so that neither has a gradient" in done.err
