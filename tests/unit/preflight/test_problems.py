"""Error messages word for word. Each case makes one mistake in a recipe that is otherwise correct."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.preflight.load import load
from tests.unit.folders import GRPO, SFT


def problems(kind: str, recipe: str, overrides: list[str] | None = None, *, resume: bool = False) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(kind, recipe, overrides or [], resume=resume)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        # Keys.
        ("grpo.num_step=3", "unknown key; did you mean num_steps?"),
        ("trainer.lr=1e-5", "unknown key; it belongs at trainer.optimizer.lr"),
        ("num_steps=3", "unknown key; it belongs at grpo.num_steps"),
        ("rewards.0.wieght=1", "unknown key; did you mean weight?"),
        ("temprature=1", "unknown key; did you mean generation.temperature?"),
        ("optimizer.lr=1e-5", "optimizer: unknown key; it belongs at trainer.optimizer"),
        # Types.
        ("run.seed=one", "must be a whole number, not 'one'"),
        ("grpo.num_steps=2.5", "must be a whole number, not 2.5"),
        ("run.probe=1", "must be true or false, not 1"),
        ("trainer.optimizer.lr=fast", "must be a number, not 'fast'"),
        ("trainer.optimizer.betas=0.9", "must be a list, not 0.9"),
        ("trainer.optimizer=adamw", "must be a section of `key: value`, not 'adamw'"),
        ("run.dir=null", "must be text, not null"),
        ("rewards=exact", "must be a list, not 'exact'"),
        ("model.max_length=long", "must be a whole number or null, not 'long'"),
        # Limits and choices.
        (
            "grpo.num_generations_per_prompt=1",
            "must be at least 2, not 1: a rollout's advantage is its distance from others of its group",
        ),
        ("generation.top_p=1.5", "must be above 0 and at most 1, not 1.5"),
        ("trainer.optimizer.lr=.nan", "must be a finite number, above 0, not .nan"),
        ("grpo.loss.proximal=recomput", "must be one of auto, rollout, recompute, not 'recomput'; did you mean "
         "recompute?"),
        ("trainer.optimizer.schedule=cos", "must be one of constant, linear, cosine, not 'cos'; did you mean cosine?"),
        # Files.
        ("model.path=modle", "no file or folder modle; did you mean model?"),
        ("model.path=/nowhere/at/all", "no file or folder /nowhere/at/all; a hub name is organisation/name"),
        ("model.path=train.jsonl", "HOME/train.jsonl is a file; needed: a Hugging Face model folder"),
        ("model.path=empty", "HOME/empty has no config.json; needed: a Hugging Face model folder"),
        ("model.tokenizer=empty", "HOME/empty has no tokenizer.json; set model.tokenizer to a folder that has one"),
        ("data.train.path=trian.jsonl", "no file or folder trian.jsonl; did you mean train.jsonl?"),
        ("data.train.sources={a: {path: train.jsonl}}", "data.train.path names a data set, and these "
         "name others: set path to null or sources to {}"),
        ("data.train.path=null", "not set: a file (.jsonl, .json, .csv, .parquet), or a hub dataset name"),
        ("data.validation.path=empty.jsonl", "empty.jsonl: is empty"),
        ("data.train.path=mine.py", "mine.py is no .jsonl, .jsonl.gz, .json, .csv or .parquet file"),
        ("data.train.path=text.jsonl", "text.jsonl:2: not JSON: Expecting value (column 1)"),
        ("data.chat_template=chat.jinja", "no file or folder chat.jinja; did you mean chats.jsonl?"),
        # Rewards.
        (
            "rewards=[]",
            "is empty: at least one reward, for example `- name: exact`, or grpo.loss.distillation with a teacher",
        ),
        ("rewards.0.weight=0", "the weights are all 0: nothing would be learnt"),
        (
            "rewards=[{name: exact, correct_at: 1}, {name: mine:brevity, correct_at: 0.5}]",
            "rewards.1.correct_at: one reward decides what is right; rewards.0 has a correct_at too: leave one at null",
        ),
        # Advantages.
        ("grpo.advantage={name: pass_at_k, k: 8}", "grpo.advantage.k: must be below grpo.num_generations_per_prompt=8, "
         "not 8: every advantage would be 0"),
        ("grpo.advantage={name: quantile, quantile: 1}", "grpo.advantage.quantile: must be above 0 and below 1, not 1"),
        ("grpo.advantage={name: batch_normalized, baseline: mean}", "grpo.advantage.baseline: must be one of "
         "none, group_mean, not 'mean'"),
        # Contradictions.
        (
            "grpo.updates_per_step=3",
            "grpo.num_prompts_per_step: 32 prompts cannot be shared equally among 3 updates a step; try 33",
        ),
        ("trainer.num_ranks=512", "512 ranks but only 256 rollouts an update: at least one a rank is needed"),
        ("model.max_length=512", "must be at most 256, the model's max_position_embeddings, not 512"),
        ("generation.max_new_tokens=256", "must be below the longest sequence, 256, not 256"),
        ("data.max_prompt_length=200", "200 + generation.max_new_tokens 64 = 264 is above the longest sequence, 256; "
         "try 192"),
        ("trainer.micro_batch_tokens=100", "must hold the longest sequence, 128 tokens, not 100; raise it, or lower "
         "model.max_length or data.max_prompt_length"),
        ("generation.tensor_parallel_size=3", "must divide the model's 4 attention heads (1, 2, 4), not 3"),
        ("trainer.optimizer.betas=[0.9]", "must be two numbers, not 1"),
        ("validation.num_generations=4", "4 greedy answers are all the same; set validation.temperature above 0, or 1 "
         "here"),
        ("telemetry.profile_updates=[3, 1]", "must be [first, last], not [3, 1]"),
        ("run.name=false", "must be text or null, not false"),
        ("run.name=a/b", "must be letters, digits and any of . _ - + =, not 'a/b'"),
        ("run.name=used", "runs/used exists: continue it with --resume runs/used, or choose another name"),
    ],
)  # fmt: skip
def test_an_override_that_is_wrong_is_one_line_with_its_position(home: Path, override: str, expected: str) -> None:
    (home / "empty").mkdir()
    (home / "empty.jsonl").write_text("\n")
    (home / "text.jsonl").write_text("\nhello\n")
    (home / "runs/used").mkdir(parents=True)
    (home / "runs/used/config.yaml").write_text("")
    lines = problems("grpo", "grpo.recipe.yaml", [override])
    assert [line.replace(str(home), "HOME") for line in lines] == [f"override 1: {override}: {expected}"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("path: model", "paht: model"), "x.yaml:3: model.paht: unknown key; did you mean path?"),
        (("max_new_tokens: 64", "max_new_tokens: 64 tokens"), "x.yaml:11: generation.max_new_tokens: must be a whole "
         "number, not '64 tokens'"),
        (("- name: exact", "- name: exat"), "x.yaml:9: rewards.0.name: must be exact, regex, math_verify, "
         "reasoning_gym, judge or module:function, not exat; did you mean exact?"),
        (("- name: exact", "- name: regex"), "x.yaml:9: rewards.0.name: regex needs a pattern, for example "
         r"'answer is (\d+)'"),
        (("- name: exact", "- name: regex\n    pattern: '(a'"), "x.yaml:10: rewards.0.pattern: no regular expression: "
         "missing ), unterminated subpattern at position 0"),
        (("- name: exact", "- name: regex\n    pattern: a+"), "x.yaml:10: rewards.0.pattern: has no group: put what is "
         "compared with the answer in brackets, not a+"),
        (("- name: exact", "- name: exact\n    pattern: a"), "x.yaml:10: rewards.0.pattern: only regex has a pattern, "
         "exact has none"),
        (("- name: exact", "- name: mine:brevty"), "x.yaml:9: rewards.0.name: mine.py defines no brevty; did you mean "
         "brevity?"),
        (("- name: exact", "- name: theirs:f"), "x.yaml:9: rewards.0.name: no module theirs beside the recipe, "
         "in the current directory or on the Python path"),
        (("- name: exact", "- name: their.py:f"), "x.yaml:9: rewards.0.name: no file or folder their.py"),
        (("rewards:", "reward:"), "x.yaml:8: reward: unknown key; did you mean rewards?"),
        (("defaults: grpo.yaml", "kind: gpro"), "x.yaml:1: kind: must be one of grpo, sft: inherit it, "
         "`defaults: grpo.yaml` or `defaults: sft.yaml`"),
        (("defaults: grpo.yaml", "defaults: sft.yaml"), "configs/sft.yaml:3: kind: this is a recipe for sft; use "
         "`rlctl train sft`"),
    ],
)  # fmt: skip
def test_a_recipe_that_is_wrong_is_one_line_with_file_and_line(
    home: Path, change: tuple[str, str], expected: str
) -> None:
    (home / "x.yaml").write_text(GRPO.replace(*change))
    assert problems("grpo", "x.yaml")[0] == expected


def test_what_has_no_default_must_be_set(home: Path) -> None:
    (home / "x.yaml").write_text("defaults: grpo.yaml\ndata: {train: {path: train.jsonl}}\n")
    assert problems("grpo", "x.yaml") == [
        "x.yaml: model.path: not set, and has no default: A Hugging Face folder, or the hub name, of a causal language "
        "model. A run, by its directory or its name, is its newest checkpoint. A checkpoint's folder is that "
        "checkpoint",
        "x.yaml: rewards: not set, and has no default: The rewards, summed by weight. One reward "
        "decides which answers are right (correct_at). [] is for a run that learns from grpo.loss.distillation alone",
    ]


def test_a_system_prompt_that_no_tokenizer_takes_is_told_with_the_config(home: Path) -> None:
    (home / "x.yaml").write_text(r"""
defaults: grpo.recipe.yaml
data: {system_prompt: "Be brief \ud83d"}
""")
    assert problems("grpo", "x.yaml") == [
        "x.yaml:3: data.system_prompt: must be text that UTF-8 and file names can hold, without NUL or surrogates"
    ]


def test_a_recipe_that_inherits_nothing_is_told_so_once_a_section(home: Path) -> None:
    (home / "x.yaml").write_text("kind: sft\n")
    lines = problems("sft", "x.yaml")
    assert len(lines) == 13
    assert lines[0] == (
        "x.yaml: run: missing section: inherit the defaults, `defaults: grpo.yaml` or `defaults: sft.yaml`"
    )


def test_columns_missing_from_the_first_row_name_the_data_file_and_line(home: Path) -> None:
    (home / "train.jsonl").write_text('\n{"promt": "1+1=", "result": "2"}\n')
    assert problems("grpo", "grpo.recipe.yaml") == [
        "train.jsonl:2: data.train.prompt_key: no column prompt or messages; did you mean promt?",
        "train.jsonl:2: data.train.answer_key: no column answer; it has promt, result",
    ]


def test_a_function_of_the_users_needs_no_answer_column(home: Path) -> None:
    (home / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    load("grpo", "grpo.recipe.yaml", ["rewards.0.name=mine:brevity"])
    assert problems("grpo", "grpo.recipe.yaml") == [
        "train.jsonl:1: data.train.answer_key: no column answer; it has prompt"
    ]


def test_a_parquet_file_is_checked_like_a_jsonl_file(home: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table({"prompt": ["1+1="], "solution": ["2"]}), home / "train.parquet")
    assert problems("grpo", "grpo.recipe.yaml", ["data.train.path=train.parquet"]) == [
        "train.parquet:1: data.train.answer_key: no column answer; these are TRL's columns: set "
        "data.train.answer_key=solution"
    ]
    load("grpo", "grpo.recipe.yaml", ["data.train.path=train.parquet", "data.train.answer_key=solution"])


def test_a_folder_that_is_no_model_says_so(home: Path) -> None:
    (home / "model/config.json").write_text("{}")
    assert problems("grpo", "grpo.recipe.yaml") == [
        f"grpo.recipe.yaml:3: model.path: {home}/model/config.json has no model_type; needed: a Hugging Face model's "
        "config.json"
    ]


def test_a_model_without_weights_needs_random_init(home: Path) -> None:
    (home / "model/model.safetensors").unlink()
    assert problems("grpo", "grpo.recipe.yaml") == [
        f"grpo.recipe.yaml:3: model.path: {home}/model has no weights: it needs model.safetensors, or its index; "
        "model.random_init=true starts from random weights"
    ]
    load("grpo", "grpo.recipe.yaml", ["model.random_init=true"])


def test_an_argument_that_the_chat_template_does_not_take_is_told(home: Path) -> None:
    (home / "model/chat_template.jinja").write_text("{{ messages }}{{ enable_thinking }}")
    override = "data.chat_template_kwargs.thinking=false"
    message = "is no argument of the chat template, which takes enable_thinking; did you mean enable_thinking?"
    assert problems("sft", "sft.recipe.yaml", [override]) == [f"override 1: {override}: {message}"]
    load("sft", "sft.recipe.yaml", ["data.chat_template_kwargs={enable_thinking: false}"])
    assert problems("sft", "sft.recipe.yaml", [override, "data.chat_template=none"]) == [
        "override 2: data.chat_template=none: data.chat_template_kwargs: needs a chat template, but data.chat_template "
        "is none"
    ]


def test_sft_has_its_own_contradictions(home: Path) -> None:
    overrides = ["trainer.num_ranks=8", "sft.batch_size=4", "trainer.micro_batch_tokens=128"]
    overrides += ["data.max_prompt_length=256", "data.system_prompt=Be brief", "data.chat_template=none"]
    assert problems("sft", "sft.recipe.yaml", overrides) == [
        "override 4: data.max_prompt_length=256: must be below the longest sequence, 256, not 256",
        "override 3: trainer.micro_batch_tokens=128: must hold the longest sequence, 256 tokens, not 128; raise it, or "
        "lower model.max_length",
        "override 6: data.chat_template=none: data.system_prompt: needs a chat template, "
        "but data.chat_template is none",
        "override 2: sft.batch_size=4: must be at least the 8 ranks of the trainer, not 4",
    ]


def test_a_compiled_graph_is_on_off_or_required_and_warms_up_within_the_models_length(home: Path) -> None:
    overrides = ["ray_compiled_graph.enabled=requir", "ray_compiled_graph.warmup_seq_len=9999"]
    assert problems("sft", "sft.recipe.yaml", overrides) == [
        "override 1: ray_compiled_graph.enabled=requir: must be require or true or false, not 'requir'; did you mean "
        "require?",
        "override 2: ray_compiled_graph.warmup_seq_len=9999: must be at most the longest sequence, 256, not 9999",
    ]
    load("sft", "sft.recipe.yaml", ["ray_compiled_graph.enabled=require", "ray_compiled_graph.warmup_seq_len=256"])


def test_all_problems_come_at_once_and_one_mistake_is_reported_once(home: Path) -> None:
    (home / "x.yaml").write_text(GRPO.replace("64\n", "many\n").replace("exact", "exat").replace("model\n", "modle\n"))
    assert problems("grpo", "x.yaml", ["grpo.updates_per_step=5", "sed=1"]) == [
        "override 2: sed=1: unknown key; did you mean run.seed?",
        "x.yaml:3: model.path: no file or folder modle; did you mean model?",
        "x.yaml:7: data.max_prompt_length: must be a whole number or null, not 'many'",
        "x.yaml:11: generation.max_new_tokens: must be a whole number, not 'many'",
        "x.yaml:9: rewards.0.name: must be exact, regex, math_verify, reasoning_gym, judge "
        "or module:function, not exat; did you mean exact?",
        "override 1: grpo.updates_per_step=5: grpo.num_prompts_per_step: 32 prompts cannot be shared equally among "
        "5 updates a step; try 30",
    ]


def test_a_name_in_use_is_fine_when_resuming(home: Path) -> None:
    (home / "runs/used").mkdir(parents=True)
    assert problems("grpo", "grpo.recipe.yaml", ["run.name=used"]) == [
        "override 1: run.name=used: runs/used exists: choose another name"
    ]
    load("grpo", "grpo.recipe.yaml", ["run.name=used"], resume=True)


def test_text_keeps_the_digits_it_was_written_with(home: Path) -> None:
    config = load("grpo", "grpo.recipe.yaml", ["run.name=007", "data.train.split=1e3"]).config
    assert (config.run.name, config.data.train.split) == ("007", "1e3")


def test_a_check_needs_neither_torch_nor_ray(home: Path) -> None:
    code = (
        "import sys; from rlctl.preflight.load import load; load('grpo', 'grpo.recipe.yaml', []); "
        "print([name for name in ('torch', 'ray', 'transformers', 'vllm', 'typer', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_sft_recipe_is_fine(home: Path) -> None:
    assert (home / "sft.recipe.yaml").read_text() == SFT
    assert load("sft", "sft.recipe.yaml", []).config.kind == "sft"


def test_a_number_with_a_fraction_may_be_any_that_is_finite(home: Path) -> None:
    config = load("sft", "sft.recipe.yaml", ["trainer.optimizer.lr=1e30"]).config
    assert config.trainer.optimizer.lr == 1e30


def test_each_file_of_a_list_and_a_held_out_share_beside_a_path_is_judged(home: Path) -> None:
    (home / "s.jsonl").write_text('{"conversations": [{"from": "human", "value": "1+1="}]}\n')
    assert problems("grpo", "grpo.recipe.yaml", ["data.train.path=[train.jsonl, trian.jsonl, x-*.csv]"]) == [
        "override 1: data.train.path=[train.jsonl, trian.jsonl, x-*.csv]: data.train.path.1: no file or folder "
        "trian.jsonl; did you mean train.jsonl?",
        "override 1: data.train.path=[train.jsonl, trian.jsonl, x-*.csv]: data.train.path.2: no file has a name like "
        "x-*.csv",
    ]
    assert problems("grpo", "grpo.recipe.yaml", ["data.train.path=s.jsonl"]) == [
        "s.jsonl:1: data.train.prompt_key: no column prompt or messages; these are ShareGPT's columns: set "
        "data.train.messages_key=conversations"
    ]
    overrides = ["data.validation.path=train.jsonl", "data.validation.fraction=0.1"]
    (problem,) = problems("grpo", "grpo.recipe.yaml", overrides)
    message = "data.validation.fraction=0.1: holds rows of data.train out, and data.validation.path names others"
    assert f"{message}: set data.validation.path=null to hold rows out" in problem
    composed = load("grpo", "grpo.recipe.yaml", ["data.train.path=[train.jsonl, 's*.jsonl']"])
    assert composed.config.data.train.path == [str(home / "train.jsonl"), str(home / "s*.jsonl")]
