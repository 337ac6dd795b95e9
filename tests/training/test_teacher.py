"""The teacher: how it is written."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file

from common.models.load import load_model
from common.run.errors import UserError
from common.training import checkpoints, teacher
from models import save_tiny, tiny_model
from reference import Tensors


def test_a_teacher_is_written_in_the_sources_dtype_with_its_tied_head(tmp_path, monkeypatch):
    """From float32 weights of the last checkpoint, a layer at a time."""
    source = save_tiny(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=True)
    trained = tiny_model(seed=1, tie_word_embeddings=True).state_dict()
    monkeypatch.setattr(checkpoints, "TrainedWeights", {"last": Tensors(trained)}.get)
    monkeypatch.setattr(checkpoints, "saved_checkpoints", lambda directory: ["first", "last"])
    monkeypatch.setattr(teacher, "write_record", lambda *_: None)
    directory = tmp_path / "teacher.train"
    directory.mkdir()
    (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    monkeypatch.setattr(checkpoints, "remove_training", lambda directory: None)
    monkeypatch.setattr(teacher, "summarize", lambda lines: {})
    run_of_stage = SimpleNamespace(conversion=SimpleNamespace(model={"path": source}), started=MagicMock(),
                                   teacher=str(tmp_path / "teacher"))
    teacher.write_teacher(run_of_stage, str(directory), {})
    stored = load_file(tmp_path / "teacher" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    written = load_model(run_of_stage.teacher, torch.bfloat16)
    assert written.config.dtype == torch.bfloat16
    assert written.lm_head.weight is written.model.embed_tokens.weight
    assert written.state_dict().keys() == trained.keys()
    for name, tensor in written.state_dict().items():
        assert torch.equal(tensor, trained[name].bfloat16()), name


def test_the_first_rank_verifies_a_teacher_for_all(tmp_path, monkeypatch):
    def refuse(*_):
        raise UserError("damaged")

    monkeypatch.setattr(teacher, "read_record", lambda *_: {})
    monkeypatch.setattr(teacher, "verify_files", refuse)
    run_of_stage = SimpleNamespace(conversion=SimpleNamespace(model={}), directory=str(tmp_path / "train"),
                                   teacher=str(tmp_path), ranks=SimpleNamespace(first=False))
    assert teacher.find_teacher(run_of_stage, str(tmp_path), force=False)
    run_of_stage.ranks.first = True
    with pytest.raises(UserError, match="damaged"):
        teacher.find_teacher(run_of_stage, str(tmp_path), force=False)
