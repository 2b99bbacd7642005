"""SkyRL's untying of tied embeddings, shown in its own code path, and its absence with the fix."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# One rank over gloo, in a process of its own: the patches and the process group are process-wide.
SCRIPT = """
import json, os, sys
from pathlib import Path
model_dir, out = sys.argv[1], Path(sys.argv[2])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1", "RANK": "0"}
import torch, torch.distributed as dist
torch.set_num_threads(1)
from deskrl.training.cpu import workers
from deskrl.training.tied import retie_before_sharding
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.train.config import SkyRLTrainConfig
from transformers import AutoModelForCausalLM

dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=0, world_size=1)
workers.patch_cuda_calls()
cfg = SkyRLTrainConfig.from_cli_overrides(["trainer.policy.optimizer_config.lr=1e-2"]).trainer


def train(out):
    strategy = FSDPStrategy(
        fsdp_config=cfg.policy.fsdp_config, optimizer_config=cfg.policy.optimizer_config,
        model_config=cfg.policy.model, fsdp_strategy="fsdp", seed=0, micro_train_batch_size_per_gpu=1,
        num_training_steps=5,
    )
    strategy.setup_distributed()
    wrapped = HFModelWrapper(model_dir, use_flash_attention_2=False, bf16=False)
    model, optimizer, scheduler = strategy.prepare((wrapped, None, None))
    inner = model.model

    ids = torch.arange(100, 116)[None]
    for _ in range(2):
        logits = inner(input_ids=ids).logits[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
        strategy.optimizer_step(optimizer, model, scheduler)

    tensors = {k: v.full_tensor() for k, v in inner.state_dict().items()}
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    strategy.save_checkpoint(model, str(out / "ckpt"), 0, optimizer, scheduler)
    sync = workers.gather_weights(inner, torch.float32)
    before = {k: v.clone() for k, v in tensors.items()}
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.zero_()
    strategy.load_checkpoint(model, str(out / "ckpt"), optimizer, scheduler)
    resumed = {k: v.full_tensor() for k, v in inner.state_dict().items()}
    strategy.save_hf_model(model, str(out / "hf"))
    exported = AutoModelForCausalLM.from_pretrained(out / "hf", dtype=torch.float32)
    return {
        "parameters": sum(p.numel() for p in inner.parameters()),
        "gap": float((embedding - head).abs().max()),
        "checkpoint_bytes": sum(f.stat().st_size for f in (out / "ckpt").glob("model_*.pt")),
        "synced_head": "lm_head.weight" in sync,
        "synced": all(torch.equal(sync[k], before[k]) for k in sync),
        "resumed": all(torch.equal(resumed[k], before[k]) for k in before),
        "resumed_gap": float((resumed["model.embed_tokens.weight"] - resumed["lm_head.weight"]).abs().max()),
        "exported_head_gap": float((exported.lm_head.weight - head).abs().max()),
        "moved": float((embedding - AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
            .model.embed_tokens.weight).abs().max()),
    }


broken = train(out / "broken")
retie_before_sharding()
retie_before_sharding()  # harmless
print("RESULT" + json.dumps([broken, train(out / "fixed")]))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3 of 0.1M parameters, most of them in the embedding."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("small")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_fix_keeps_embedding_and_head_one(small: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(small), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    broken, fixed = json.loads(done.stdout.rpartition("RESULT")[2].splitlines()[0])
    embedding = 2048 * 32
    # Without it: two parameters, that differ after a step, both stored.
    assert broken["parameters"] - fixed["parameters"] == embedding
    assert broken["gap"] > 1e-3
    assert broken["checkpoint_bytes"] - fixed["checkpoint_bytes"] > 0.9 * embedding * 4
    # With it: one, through training, sync, checkpoint, resume and export.
    assert fixed["moved"] > 1e-3
    assert fixed["gap"] == fixed["resumed_gap"] == fixed["exported_head_gap"] == 0
    assert fixed["synced"] and not fixed["synced_head"]
    assert fixed["resumed"]
