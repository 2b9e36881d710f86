"""A run with another tokenizer than the model folder's exports that one, also when both folders are gone."""

import shutil
from pathlib import Path

from rlctl.models.hf_folder import Companions
from tests.tiny_models import make_model


def test_the_tokenizer_trained_with_replaces_the_models_own(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    exported, own = make_model(tmp_path / "exported"), make_model(tmp_path / "own")
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.add_tokens(["<mine>"])
    tokenizer.save_pretrained(own)
    companions = Companions.read(exported, str(own))
    shutil.rmtree(exported)
    exported.mkdir()
    companions.write(exported, "float32")
    shutil.rmtree(own)
    assert "<mine>" in AutoTokenizer.from_pretrained(exported).get_vocab()
