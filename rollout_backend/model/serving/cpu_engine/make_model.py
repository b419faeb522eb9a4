"""Convert a GGUF file into an ordinary model folder. The engine's interpreter runs it: `make_model.py GGUF FOLDER`.

It imports nothing from this package, because transformers, torch and gguf are only in the engine's environment. The
weights are stored as float32, so that engines can serve the folder in any dtype.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

END_OF_TURN = "<|im_end|>"


def main(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The file names <|im_start|>, which opens a turn, as the end of generation. A turn ends with <|im_end|>: with the
    # wrong token every completion would continue to its token limit.
    tokenizer.eos_token = END_OF_TURN
    tokenizer.pad_token = END_OF_TURN
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf} carries no chat template")
    unpacked = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    config = unpacked.config
    # The file does not contain this length.
    tokenizer.model_max_length = config.max_position_embeddings
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    # A model read from GGUF cannot be saved, even unpacked, so its weights are copied into a plain model.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
