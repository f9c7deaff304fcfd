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

from gpt2.checkpoint.contents import reason
from gpt2.checkpoint.files import load_checkpoint, save_checkpoint
from gpt2.data import tokenizer
from gpt2.inference.nanochat_layout import differences, nanochat_config, nanochat_to_hugging_face
from gpt2.inference.restore import load_model, shape_of
from kmatrix.errors import ConfigError, KmatrixError, RecordError
from kmatrix.output import run_program
from kmatrix.shapes import GPT2_VOCAB, NANOCHAT, ModelShape

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREFIX = "transformer."  # of every name except the output layer's
HEAD = "lm_head.weight"

# Hugging Face's Conv1D stores these weights as (inputs, outputs), nn.Linear as (outputs, inputs).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # constants that older files store like weights
REFUSED = 2


def to_hugging_face(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights for GPT2LMHeadModel: without vocabulary padding, with zeros for missing biases."""
    vocabulary = int(config["vocab_size"])
    found = {}
    for name, tensor in weights.items():
        value = tensor[:vocabulary] if name in ("wte.weight", HEAD) else tensor
        value = value.t() if name.endswith(TRANSPOSED) else value
        # safetensors refuses views, and tensors that share memory.
        found[name if name == HEAD else PREFIX + name] = value.detach().clone().contiguous()
    if not config["bias"]:
        weighted = [name for name in found if name.endswith(".weight") and ("ln_" in name or name.endswith(TRANSPOSED))]
        found |= {name.removesuffix("weight") + "bias": torch.zeros(found[name].shape[-1]) for name in weighted}
    return found


def from_hugging_face(weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights for our model; the exact inverse of `to_hugging_face`."""
    rows = -int(config["vocab_size"]) % int(config["vocab_multiple"])
    found = {}
    for name, tensor in weights.items():
        ours = name.removeprefix(PREFIX)
        is_tied_head = ours == HEAD and config["weight_tying"]  # a file may store the tied matrix twice
        if ours.endswith(MASKS) or is_tied_head or (ours.endswith(".bias") and not config["bias"]):
            continue
        value = tensor.t() if ours.endswith(TRANSPOSED) else tensor
        if ours in ("wte.weight", HEAD) and rows:
            value = torch.cat([value, torch.zeros(rows, value.shape[1])])
        found[ours] = value.float().clone().contiguous()
    return found


def end_token_of(config: Mapping[str, Any]) -> int | None:
    """Return the end-of-document token of a checkpoint's configuration, if it is known."""
    # The vocabulary of char, and so its last token, is in the dataset, which may be gone: None.
    fixed = (tokenizer.Gpt2Tokenizer, tokenizer.ByteTokenizer, tokenizer.BpeTokenizer)
    return {kind.name: kind.end_of_document for kind in fixed}.get(config["tokenizer"])


def nanochat_config_of(value: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """Return config.json of a nanochat2025 checkpoint."""
    end_token = end_token_of(value["config"])
    return {
        "architectures": ["NanoChatForCausalLM"],
        "model_type": "nanochat",
        **nanochat_config(shape),
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "torch_dtype": "float32",
    }


def config_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a checkpoint. Fields that only our model has are under "kmatrix"."""
    ours = value["config"]
    end_token = end_token_of(ours)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",  # transformers' name of the tanh approximation
        "layer_norm_epsilon": 1e-5,
        **{name: ours[name] for name in ("n_layer", "n_head", "n_embd", "vocab_size")},
        "n_positions": ours["block_size"],
        "n_inner": None,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), ours.get("dropout", 0.0)),
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "tie_word_embeddings": ours["weight_tying"],
        "torch_dtype": "float32",
        "kmatrix": {
            **{name: ours[name] for name in ("arch", "bias", "vocab_multiple", "tokenizer", "data_path")},
            **{name: value[name] for name in ("run_id", "step")},
        },
    }


# Keys of config.json that change what the model computes, with the values that this trainer implements. A missing key
# has transformers' default, which is the first one.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of the tanh approximation
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
FIELDS = ("n_layer", "n_head", "n_embd", "vocab_size")


def parse_config(foreign: Any, path: Path) -> dict[str, Any]:
    """Return a config.json as our configuration. Raises RecordError if the model is not a GPT-2 that we support."""
    if not isinstance(foreign, dict):
        raise unsupported(path, "it is not a JSON object")
    for name, values in COMPUTED.items():
        if name in foreign and not any(type(foreign[name]) is type(v) and foreign[name] == v for v in values):
            raise unsupported(path, f"{name} is {str(foreign[name])[:60]!r}")
    try:
        context = foreign.get("n_positions") or foreign["n_ctx"]  # n_ctx: OpenAI's own name
        if (inner := foreign.get("n_inner") or 4 * foreign["n_embd"]) != 4 * foreign["n_embd"]:
            raise unsupported(path, f"n_inner is {inner}")
        return {
            **{name: foreign[name] for name in FIELDS},
            "block_size": context,
            "weight_tying": foreign.get("tie_word_embeddings", True),
            **{"arch": "gpt2", "bias": True, "vocab_multiple": 1},
            **{"tokenizer": "gpt2" if foreign["vocab_size"] == GPT2_VOCAB else "byte", "data_path": ""},
            **foreign.get("kmatrix", {}),
        }
    except (KeyError, TypeError) as missing:
        raise unsupported(path, f"{missing} is missing") from None


def unsupported(path: Path, why: str) -> RecordError:
    return RecordError(
        f"{path} is not a GPT-2 that this trainer supports",
        why=why,
        hint="only models that compute what GPT-2 computes can be imported (docs/serving.md)",
    )


def export(path: Path, folder: Path) -> None:
    """Write the folder of a checkpoint atomically."""
    value = load_checkpoint(path)
    config = value["config"]
    arch = config.get("arch")
    if arch not in ("gpt2", *NANOCHAT):
        raise ConfigError(f"{path} is a model of type {arch!r}", why="only gpt2 and nanochat2025 can be exported")
    if arch in NANOCHAT and (other := differences(shape_of(config, path))):
        raise ConfigError(
            f"{path} is a model of type {arch!r} that transformers' NanoChat cannot compute",
            why="; ".join(other),
            hint="only models with the parts of nanochat2025 can be exported (docs/nanochat.md)",
        )
    model = load_model(value, path)
    weights = model.state_dict()
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an interrupted export
    partial.mkdir(parents=True)
    nanochat = arch in NANOCHAT
    layout = nanochat_to_hugging_face(weights, model.shape.vocab_size) if nanochat else to_hugging_face(weights, config)
    save_file(layout, partial / WEIGHTS, metadata={"format": "pt"})
    described = nanochat_config_of(value, model.shape) if nanochat else config_of(value)
    (partial / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    tokenizer_note = tokenizer_files(config, partial)
    partial.replace(folder)
    print(f"wrote {folder}: {WEIGHTS}, {CONFIG}, {tokenizer_note}")


def tokenizer_files(config: Mapping[str, Any], folder: Path) -> str:
    """Copy the tokenizer into the folder, if it is available and supported, and describe the result."""
    name = config["tokenizer"]
    if name == "gpt2" and not tokenizer.missing_gpt2():
        for source, target in zip(tokenizer.gpt2_paths().values(), ("merges.txt", "vocab.json"), strict=True):
            shutil.copyfile(source, folder / target)
        write_config(folder, "GPT2Tokenizer", config)
        return "merges.txt, vocab.json"
    own = Path(config["data_path"]) / tokenizer.FILE
    if name == "bpe" and own.is_file():
        shutil.copyfile(own, folder / tokenizer.FILE)
        write_config(folder, "PreTrainedTokenizerFast", config)
        return tokenizer.FILE
    return f"no tokenizer ({name})"


def write_config(folder: Path, kind: str, config: Mapping[str, Any]) -> None:
    """Write tokenizer_config.json, which names the tokenizer class."""
    special = {"bos_token": tokenizer.END, "eos_token": tokenizer.END, "unk_token": tokenizer.END}
    value = {"tokenizer_class": kind, "model_max_length": config["block_size"], **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_folder(folder: Path) -> dict[str, Any]:
    """Return a checkpoint with the weights in a Hugging Face folder. It cannot be resumed."""
    try:
        foreign = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(folder / WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise unreadable(folder, reason(error)) from None
    config = parse_config(foreign, folder / CONFIG)
    value = {
        "run_id": config.get("run_id", ""),
        "step": config.get("step", 0),
        "config": config,
        "optimizer": {},
    }
    shape_of(config, folder / CONFIG)  # refuses sizes that no tensor can have
    try:
        value["model"] = from_hugging_face(weights, config)
        value["model"] = load_model(value, folder).state_dict()
    except RecordError as error:
        raise unreadable(folder / WEIGHTS, error.why) from None
    except (RuntimeError, IndexError) as error:  # of a transposition or a concatenation of other dimensions
        raise unreadable(folder / WEIGHTS, reason(error)) from None
    return value


def unreadable(path: Path, why: str) -> RecordError:
    return RecordError(
        f"{path} is not a model in Hugging Face's format", why=why, hint=f"name a folder with {CONFIG} and {WEIGHTS}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpt2.inference.export", description=__doc__)
    parser.add_argument("source", type=Path, help="a checkpoint, or a folder in Hugging Face's format")
    parser.add_argument("--output", type=Path, required=True, help="the folder or checkpoint to write")
    args = parser.parse_args(argv)
    try:
        if args.output.exists():
            raise ConfigError(f"OUTPUT={args.output} exists", hint="choose another path, or delete it")
        if args.source.is_dir():
            save_checkpoint(args.output, read_folder(args.source))
            print(f"wrote {args.output}: weights only, for `make sample` and `make serve`")
        else:
            export(args.source, args.output)
    except KmatrixError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(run_program(main))
