"""A run that trains with another tokenizer than the model's exports that tokenizer, even if folders were deleted."""

import shutil
from pathlib import Path

from rlctl.models.hf_folder import Companions
from tests.tiny_models import make_model


def test_the_tokenizer_trained_with_replaces_the_models_own(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    exported = make_model(tmp_path / "exported")
    trained_with = make_model(tmp_path / "trained_with")
    tokenizer = AutoTokenizer.from_pretrained(trained_with)
    tokenizer.add_tokens(["<mine>"])
    tokenizer.save_pretrained(trained_with)
    companions = Companions.read(exported, str(trained_with))
    shutil.rmtree(exported)
    exported.mkdir()
    companions.write(exported, "float32")
    shutil.rmtree(trained_with)
    assert "<mine>" in AutoTokenizer.from_pretrained(exported).get_vocab()
