from dataclasses import replace
from pathlib import Path

from rlctl.config.schema import DataSection
from rlctl.data.load import load_prompts, load_samples

SUMS = Path(__file__).parents[3] / "recipes" / "tiny-data"


def test_the_tiny_recipes_files_become_prompts_and_samples(tokenizer, section):
    train = replace(section, path=str(SUMS / "train.jsonl"), limit=5)
    data = DataSection(train, section, system_prompt=None, chat_template="auto", max_prompt_length=6, shuffle=True)
    prompts, report = load_prompts(data, train, tokenizer)
    assert (report.rows, report.dropped, len(prompts)) == (5, 0, 5)
    assert (prompts[0].text, prompts[0].answer) == ("15+34=", "49")
    samples, _ = load_samples(data, train, tokenizer, "all", 64)
    assert tokenizer.decode(samples[0].tokens) == "15+34=49<eos>"
