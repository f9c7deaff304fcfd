"""Convert checkpoints to Hugging Face's GPT-2 format and back: a folder with config.json and model.safetensors.

python -m gpt2.inference.export CHECKPOINT --output=FOLDER
python -m gpt2.inference.export FOLDER --output=CHECKPOINT
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2.checkpoint import load_checkpoint, save_checkpoint
from gpt2.data import tokenizer
from gpt2.inference.nanochat_layout import SIZES, nanochat_config, nanochat_to_hugging_face, refuse_parts
from gpt2.inference.restore import load_model
from kmatrix.errors import ConfigError
from kmatrix.output import run_program
from kmatrix.shapes import GPT2_VOCAB

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREFIX = "transformer."  # of every name except the output layer's
HEAD = "lm_head.weight"
# Hugging Face's Conv1D stores these weights as (inputs, outputs), nn.Linear as (outputs, inputs).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # constants that older files store like weights
# Not of char, whose vocabulary is in the dataset.
END_TOKENS = {"gpt2": GPT2_VOCAB - 1, "byte": 256, "bpe": tokenizer.BpeTokenizer.end_of_document}
# Fields of config.json that change what the model computes: transformers' defaults, which this trainer implements.
COMPUTED: dict[str, Any] = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "n_inner": None,
}
COMMON = ("n_layer", "n_head", "n_embd", "vocab_size")  # fields with the same name there


def to_hugging_face(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights for GPT2LMHeadModel: without vocabulary padding, with zeros for missing biases."""
    found = {}
    for name, tensor in weights.items():
        value = tensor[: config["vocab_size"]] if name in ("wte.weight", HEAD) else tensor
        value = value.t() if name.endswith(TRANSPOSED) else value
        # safetensors refuses views, and tensors that share memory.
        found[name if name == HEAD else PREFIX + name] = value.clone().contiguous()
    if not config["bias"]:
        weighted = [name for name in found if "ln_" in name or name.endswith(TRANSPOSED)]
        found |= {name.removesuffix("weight") + "bias": torch.zeros(found[name].shape[-1]) for name in weighted}
    return found


def from_hugging_face(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights for our model; the exact inverse of `to_hugging_face`."""
    rows = -config["vocab_size"] % config["vocab_multiple"]
    found = {}
    for name, tensor in weights.items():
        ours = name.removeprefix(PREFIX)
        is_tied_head = ours == HEAD and config["weight_tying"]  # a file may store the tied matrix twice
        if ours.endswith(MASKS) or is_tied_head or (ours.endswith(".bias") and not config["bias"]):
            continue
        value = tensor.t() if ours.endswith(TRANSPOSED) else tensor
        if ours in ("wte.weight", HEAD):
            value = torch.cat([value, torch.zeros(rows, value.shape[1])])
        found[ours] = value.float().clone().contiguous()
    return found


def to_config(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a checkpoint of GPT-2. Fields that only our model has are under "kmatrix"."""
    ours = value["config"]
    return {
        "architectures": ["GPT2LMHeadModel"],
        **COMPUTED,
        **{name: ours[name] for name in COMMON},
        "n_positions": ours["block_size"],
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), ours.get("dropout", 0.0)),
        "tie_word_embeddings": ours["weight_tying"],
        "kmatrix": {
            **{name: ours[name] for name in ("arch", "bias", "vocab_multiple", "tokenizer", "data_path")},
            **{name: value[name] for name in ("run_id", "step")},
        },
    }


def from_config(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json as our configuration. Raises ValueError if the model does not compute what GPT-2 does."""
    for name, value in COMPUTED.items():
        if theirs.get(name, value) != value:
            raise ValueError(f"{name} is {theirs[name]!r}")
    return {
        **{name: theirs[name] for name in COMMON},
        "block_size": theirs["n_positions"],
        "weight_tying": theirs.get("tie_word_embeddings", True),
        **{"arch": "gpt2", "bias": True, "vocab_multiple": 1},
        **{"tokenizer": "gpt2" if theirs["vocab_size"] == GPT2_VOCAB else "byte", "data_path": ""},
        **theirs.get("kmatrix", {}),
    }


def export(path: Path, folder: Path) -> None:
    """Write the folder of a checkpoint atomically."""
    value = load_checkpoint(path)
    model, config = load_model(value, path), value["config"]
    if model.shape.is_nanochat:
        described = nanochat_config(model.shape)
        layout = nanochat_to_hugging_face(model.state_dict(), model.shape.vocab_size)
    else:
        refuse_parts(model.shape, SIZES, {"arch": "gpt2"})
        described, layout = to_config(value), to_hugging_face(model.state_dict(), config)
    end_token = END_TOKENS.get(config["tokenizer"])
    described |= {"bos_token_id": end_token, "eos_token_id": end_token, "torch_dtype": "float32"}
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an interrupted export
    partial.mkdir(parents=True)
    save_file(layout, partial / WEIGHTS, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(described, indent=2), encoding="utf-8")
    write_tokenizer(config, partial)
    print(f"wrote {folder}: {', '.join(sorted(path.name for path in partial.iterdir()))}")
    partial.replace(folder)


def write_tokenizer(config: Mapping[str, Any], folder: Path) -> None:
    """Copy the tokenizer into the folder, if transformers has one of its kind and its files are there."""
    own = Path(config["data_path"]) / tokenizer.FILE
    if config["tokenizer"] == "gpt2" and not tokenizer.missing_gpt2():
        kind, files = (
            "GPT2Tokenizer",
            dict(zip(("merges.txt", "vocab.json"), tokenizer.gpt2_paths().values(), strict=True)),
        )
    elif config["tokenizer"] == "bpe" and own.is_file():
        kind, files = "PreTrainedTokenizerFast", {tokenizer.FILE: own}
    else:
        return
    for target, source in files.items():
        shutil.copyfile(source, folder / target)
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), tokenizer.END)
    about = {"tokenizer_class": kind, "model_max_length": config["block_size"], **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2), encoding="utf-8")


def read_folder(folder: Path) -> dict[str, Any]:
    """Return a checkpoint with the weights in a Hugging Face folder. It cannot be resumed."""
    try:
        config = from_config(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
        weights = from_hugging_face(load_file(folder / WEIGHTS), config)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"{folder} is not a GPT-2 in Hugging Face's format",
            why=f"{type(error).__name__}: {error}",
            hint=f"name a folder with {CONFIG} and {WEIGHTS}, of a model that computes what GPT-2 does",
        ) from None
    value = {"run_id": config.get("run_id", ""), "step": config.get("step", 0), "config": config, "optimizer": {}}
    return {**value, "model": load_model({**value, "model": weights}, folder).state_dict()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpt2.inference.export", description=__doc__)
    parser.add_argument("source", type=Path, help="a checkpoint, or a folder in Hugging Face's format")
    parser.add_argument("--output", type=Path, required=True, help="the folder or checkpoint to write")
    args = parser.parse_args(argv)
    if args.output.exists():
        raise ConfigError(f"OUTPUT={args.output} exists", hint="choose another path, or delete it")
    if args.source.is_dir():
        save_checkpoint(args.output, read_folder(args.source))
        print(f"wrote {args.output}: weights only, for `make sample` and `make serve`")
    else:
        export(args.source, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
