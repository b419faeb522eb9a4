"""A tiny model that sees, of random weights. Run by the engine's Python:

seeing_model.py make FOLDER       makes it in a folder that has the tokenizer
seeing_model.py retrain FOLDER    changes the weights of its image encoder
seeing_model.py prompt FOLDER     tokens, by template and processor, of {"messages", "images": [base64]} on stdin
seeing_model.py logprobs FOLDER   of the tokens of {"ids", "images": [[start, end, base64], ...]} on stdin
"""

import base64
import io
import json
import sys
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
PIXELS = {
    "size": {"shortest_edge": 64 * 64, "longest_edge": 4096 * 4096},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "processor_class": "Qwen3VLProcessor",
}


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_parameters": ROPE,
    "rope_scaling": ROPE,
    "dtype": "float32",
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.3,
}
QWEN3 = {"vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645}
QWEN3_IMAGES = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def model_of(text: dict, of_images: dict) -> Qwen3VLForConditionalGeneration:
    """The same weights for the same size of a vocabulary."""
    torch.manual_seed(0)
    config = Qwen3VLConfig(text_config={**TEXT, **text}, vision_config=VISION, **of_images, tie_word_embeddings=False)
    return Qwen3VLForConditionalGeneration(config).float()


def save(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """With the settings of its image processor."""
    model.save_pretrained(folder)
    images = {**PIXELS, "image_processor_type": "Qwen2VLImageProcessorFast"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {**PIXELS, "video_processor_type": "Qwen3VLVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))


def make(folder: Path) -> None:
    save(model_of(QWEN3, QWEN3_IMAGES), folder)


def retrain(folder: Path) -> None:
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.model.visual.parameters():
            weights.add_(0.05 * torch.randn_like(weights))
    model.save_pretrained(folder)


def prompt(folder: Path) -> None:
    asked, tokenizer = json.load(sys.stdin), AutoTokenizer.from_pretrained(folder)
    prepare = Qwen2VLImageProcessorPil.from_pretrained(folder)
    images = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for data in asked["images"]]
    text = tokenizer.apply_chat_template(asked["messages"], tokenize=False, add_generation_prompt=True)
    before, *parts = text.split("<|image_pad|>")
    for grid, part in zip(prepare(images=images, return_tensors="pt")["image_grid_thw"], parts, strict=True):
        before += "<|image_pad|>" * (int(grid.prod()) // PIXELS["merge_size"] ** 2) + part
    json.dump(tokenizer.encode(before, add_special_tokens=False), sys.stdout)


def logprobs(folder: Path) -> None:
    asked = json.load(sys.stdin)
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    prepare = Qwen2VLImageProcessorPil.from_pretrained(folder)
    images = [Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB") for _, _, data in asked["images"]]
    ids = torch.tensor([asked["ids"]])
    kinds = torch.zeros_like(ids)
    for start, end, _ in asked["images"]:
        kinds[0, start:end] = 1
    with torch.inference_mode():
        logits = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=kinds,
            **prepare(images=images, return_tensors="pt"),
        ).logits[0]
    known = torch.log_softmax(logits[:-1].float(), dim=-1).gather(1, ids[0, 1:, None])[:, 0]
    json.dump([0.0, *known.tolist()], sys.stdout)


if __name__ == "__main__":
    {"make": make, "retrain": retrain, "prompt": prompt, "logprobs": logprobs}[sys.argv[1]](Path(sys.argv[2]))
