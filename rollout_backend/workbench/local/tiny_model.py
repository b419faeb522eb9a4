"""Create a random model with a few thousand weights, the ChatML template and one token per byte, for smoke runs.

Its text is random, but a smoke run shows whether the trained model is the served model.
"""

import shutil
from pathlib import Path

BYTE_MODEL = Path(__file__).parent / "byte_model"
CONTEXT_LENGTH = 1024


def make_tiny_model(
    folder: Path, seed: int = 0, *, tied: bool = True, hidden: int = 64, heads: int = 4, layers: int = 2
) -> Path:
    """Create the model in `folder`, in float32; equal seeds give equal weights. Needs transformers and torch.

    If `tied`, the output layer is the input embedding, as in small real models. Heads have the size `hidden / heads`:
    vLLM 0.24.0 on the CPU needs at least 32, and FlashInfer on a GPU 64.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    for file in BYTE_MODEL.glob("*.json"):
        shutil.copy(file, folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
