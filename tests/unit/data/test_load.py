from pathlib import Path

from rlctl.config.schema import GrpoConfig, SftConfig
from rlctl.data.load import RowReader, load_chat, load_prompts, load_samples
from rlctl.preflight.load import load

SUMS = Path(__file__).parents[3] / "recipes" / "tiny-data"


def test_the_tiny_recipes_files_become_prompts_and_samples() -> None:
    grpo = load("grpo", "grpo-tiny", ["data.train.limit=5", "data.max_prompt_length=6"]).config
    sft = load("sft", "sft-tiny", ["data.train.limit=5"]).config
    assert isinstance(grpo, GrpoConfig) and isinstance(sft, SftConfig)
    rows, chat = RowReader(grpo).take(), load_chat(grpo, grpo.model.path)
    assert (len(rows.train), len(rows.validation)) == (5, 200)
    prompts, report = load_prompts(grpo, grpo.data.train, chat, rows.train)
    assert (report.rows, report.dropped, len(prompts)) == (5, 0, 5)
    assert (prompts[0].text, prompts[0].answer) == ("15+34=", "49")
    samples, _ = load_samples(sft, sft.data.train, chat, RowReader(sft).take().train, 64)
    assert chat.tokenizer.decode(samples[0].tokens) == "15+34=49<eos>"


def test_rows_are_read_once_and_again_if_a_run_restarts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": 2}\n')
    reader = RowReader(load("grpo", "grpo-tiny", [f"data.train.path={file}"]).config)
    ahead = reader.read()
    file.write_text('{"prompt": "2+2=", "answer": 4}\n')
    assert reader.take() is ahead
    assert reader.take().train[0].values == {"prompt": "2+2=", "answer": 4}
