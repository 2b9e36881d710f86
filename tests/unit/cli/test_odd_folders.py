"""Folders of models and adapters with random changes: a check and a dry run report one line, never a traceback."""

import json
import random
import re
import shutil
from collections.abc import Iterable, Iterator
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

INFINITE = float("inf")
HUGE = 10**30
VALUES: list[Any] = [
    *(None, True, -1, 0, 0.5, 3, 1 << 40, HUGE, INFINITE, float("nan")),
    *("", "odd", "\x1b[31mred", "a" * 1000, [], {}, [INFINITE], [[1]], {"a": [None]}, ["x", 1]),
]
TEXTS = [b"", b"[]", b"null", b"3", b'{"a":', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 400 + b"1" + b"}" * 400]
# File -> number of random changes to try. Chat templates are tested below.
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
def sound_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, in a file that an index lists, and an adapter."""
    root = tmp_path_factory.mktemp("sound")
    model = make_model(root / "model", "qwen3", hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    linears = load_facts(model).sizes.linears
    spec = AdapterSpec(rank=2, alpha=4.0, rslora=False, dropout=0.0, targets=linears[:2])
    make_adapter(root / "adapter", model, spec)
    names = json.loads((model / "model.safetensors").read_bytes()[8:].partition(b"}}")[0] + b"}}").keys()
    index = {"weight_map": dict.fromkeys(set(names) - {"__metadata__"}, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def walk_paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value inside a JSON value."""
    branches: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        branches = tree.items()
    elif isinstance(tree, list):
        branches = enumerate(tree)
    for key, branch in branches:
        yield (*path, key)
        yield from walk_paths(branch, (*path, key))


def mutate_json(original: Any, rng: random.Random) -> tuple[str, bytes]:
    """Change one value of a JSON document at random. Return a description of the change, and the new text."""
    if rng.random() < 0.1:
        text = rng.choice(TEXTS)
        return str(text[:20]), text
    tree = json.loads(json.dumps(original))
    # A key of the outermost object is as likely as all deeper ones together.
    paths = list(walk_paths(tree)) if rng.random() < 0.5 else [(key,) for key in tree]
    *above, last = rng.choice([path for path in paths if path[-1] != "chat_template"])
    owner = tree
    for key in above:
        owner = owner[key]
    if rng.random() < 0.15:
        del owner[last]
        return f"without {above} {last}", json.dumps(tree).encode()
    owner[last] = rng.choice(VALUES)
    return f"{above} {last}: {owner[last]!r:.40}", json.dumps(tree).encode()


def mutate_weights(original: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Change a safetensors file at random, mostly in its header. Return a description of the change, and the bytes."""
    length = int.from_bytes(original[:8], "little")
    if rng.random() < 0.2:
        beginning = original[: rng.randrange(len(original))]
        other_length = rng.randbytes(8) + original[8:]
        longer = original + b"\0"
        noise = original[:8] + rng.randbytes(length)
        changed = rng.choice([beginning, other_length, longer, noise])
        return f"{len(changed)} of {len(original)} bytes", changed
    words, header = mutate_json(json.loads(original[8 : 8 + length]), rng)
    return words, len(header).to_bytes(8, "little") + header + original[8 + length :]


@pytest.mark.parametrize("name", COUNTS)
def test_generated_folders_end_in_a_line(
    name: str, sound_folder: Path, rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Facts are derived in this process, since another process takes seconds.
    monkeypatch.setattr(facts, "derive_apart", load_facts)
    monkeypatch.setattr("rlctl.models.model_sizes.find_facts", load_facts)
    shutil.rmtree(home / "model")
    shutil.copytree(sound_folder, home, dirs_exist_ok=True)
    config = home / "adapter/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": str(home / "model")}))
    arguments = ["sft.recipe.yaml"]
    if name.startswith("adapter"):
        arguments += ["model.path=adapter", "lora={rank: 2, alpha: 4, targets: [q_proj, k_proj]}"]
    (home / "sft.recipe.yaml").write_text(SFT)
    file = home / name
    original = file.read_bytes()
    rng = random.Random(name)
    exit_codes: list[int] = []
    for number in range(COUNTS[name] + 1):
        # The first time the file is as it was.
        change = "none"
        content = original
        if number and file.suffix == ".safetensors":
            change, content = mutate_weights(original, rng)
        elif number:
            change, content = mutate_json(json.loads(original), rng)
        file.write_bytes(content)
        for command in (("config", "check"), ("train", "sft", "--dry-run")):
            load_tokenizer.cache_clear()
            try:
                done = rlctl(*command, *arguments)
            except Exception as error:
                raise AssertionError(f"{change}: {command}: {error!r}") from error
            errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
            assert done.code == (2 if errors else 0), (change, command, done)
            assert all(len(line) < 1000 and line.isprintable() for line in errors), errors
            exit_codes.append(done.code)
    assert exit_codes[:2] == [0, 0], done
    assert 2 in exit_codes or name.endswith("rlctl_base.json")


@pytest.mark.parametrize(
    ("name", "key", "odd_value", "message"),
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
    name: str, key: str, odd_value: Any, message: str, sound_folder: Path, rlctl: Rlctl, home: Path
) -> None:
    shutil.rmtree(home / "model")
    shutil.copytree(sound_folder, home, dirs_exist_ok=True)
    file = home / name
    file.write_text(json.dumps({**json.loads(file.read_text()), key: odd_value}))
    done = rlctl("train", "sft", "--dry-run", "sft.recipe.yaml", f"model.path={name.partition('/')[0]}")
    assert done.code == 2 and re.search(rf"{re.escape(str(file))}[: ].*{message}", done.err), done.err


REFUSED = r"the chat template refuses the row: {}; set another data\.chat_template"


@pytest.mark.parametrize(
    ("template", "message"),
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
    template: Any, message: str, rlctl: Rlctl, home: Path
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
        assert re.search(message, errors[0]), (command, done)


def test_an_adapter_of_zeros_is_refused_by_name(sound_folder: Path, rlctl: Rlctl, home: Path) -> None:
    shutil.copytree(sound_folder / "adapter", home / "adapter")
    weights = home / "adapter/adapter_model.safetensors"
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(weights).items()}
    save_file(zeros, weights)
    done = rlctl("model", "check", str(home / "adapter"))
    assert done.code == 2
    assert "A and B of model.layers.0.self_attn.q_proj are all zero, so that neither has a gradient" in done.err
