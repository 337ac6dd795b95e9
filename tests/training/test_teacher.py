"""The teacher: how it is written."""

from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from common.models.load import load_model
from common.training import checkpoints, students, teacher
from common.training.engine import Job
from models import save_tiny, tiny_model
from reference import RATES, built


def test_a_teacher_is_written_in_the_sources_dtype_with_its_tied_head(group_of_one, tmp_path):
    """From float32 weights of the last checkpoint, whose training is then removed."""
    source = save_tiny(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=True)
    trained = built(save_tiny(tmp_path / "trained", seed=1, tie_word_embeddings=True), group_of_one)
    directory, written = tmp_path / "teacher.train", tmp_path / "teacher"
    checkpoints.begin(str(directory), {}, group_of_one)
    (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 1, "tokens": 1}\n')
    optimizer = students.student_optimizer(trained, RATES)
    checkpoints.save(Job(trained, optimizer, str(directory), group_of_one, step=1))
    run = SimpleNamespace(conversion=SimpleNamespace(model={"path": source}), teacher=str(written),
                          started=SimpleNamespace(record=lambda model, summary: {"summary": summary}))
    teacher.write_teacher(run, str(directory), {})
    assert not directory.exists()
    assert {tensor.dtype for tensor in load_file(written / "model.safetensors").values()} == {torch.bfloat16}
    loaded = load_model(str(written), torch.bfloat16)
    assert loaded.config.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, tensor in tiny_model(seed=1, tie_word_embeddings=True).state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16()), name
