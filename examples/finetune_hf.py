"""Fine-tunes a transformers model with Trainer: packed rows, LoRA or all weights, bf16 or FP8.

``pip install ".[examples,hf]"`` installs what it needs. ``--model`` names a folder (or a model of
the Hugging Face Hub) with a model and its tokenizer; without it, a small Llama starts from random
weights. A run writes ``runs/<name>/``: checkpoints of Trainer, metrics.jsonl, results.json and, at
the end, ``model/``, which ``--model`` accepts. ``--resume`` continues from the last checkpoint.
``--twin`` also trains without opfuser, and compares.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from finetune_data import PackedRows, read_documents, train_tokenizer
from lm_recipes import RECIPES
from lm_run import RunFolder, report_twin
from torch import Tensor, nn
from torch.utils.data import Subset

import opfuser
import opfuser.hf

WARM = 5  # steps in which kernels are compiled and calls recorded
VALIDATED = 64  # rows


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="finetuned", help="the run is kept in runs/NAME")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs are kept")
    parser.add_argument("--model", help="folder or name of a model and its tokenizer")
    parser.add_argument(
        "--text", type=Path, nargs="*", default=[], help="files or folders (default: Python's)"
    )
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train only adapters")
    parser.add_argument("--recipe", choices=RECIPES, help="FP8 recipe of the GEMMs")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=4, help="rows per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per row")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, adapters and batches")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--tensorboard", action="store_true", help="write curves to runs/NAME")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--twin", action="store_true", help="also train without opfuser")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    options = parser.parse_args(argv)
    if options.recipe and options.lora:
        parser.error("--recipe: linear modules with adapters are not computed in FP8 (--lora)")
    return options


def small_llama(vocabulary: int, length: int) -> transformers.PreTrainedModel:
    """A model of some million parameters, with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """``model`` with LoRA adapters on all linear modules but the head, the only trained ones."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


class FineTuning(transformers.Trainer):
    """Trainer that calls the model within a recipe, and notes each step's loss and time.

    Args:
        folder: where metrics go.
        recipe: of quantized compute, if any.
        arguments: of Trainer.
    """

    def __init__(self, folder: RunFolder, recipe: str | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.folder, self.recipe = folder, recipe
        self.seconds: list[float] = []

    def autocast(self) -> AbstractContextManager[Any]:
        """The region in which the model is called."""
        return (
            nullcontext() if self.recipe is None else opfuser.autocast(recipe=RECIPES[self.recipe])
        )

    def compute_loss(self, *inputs: Any, **keywords: Any) -> Any:
        with self.autocast():
            return super().compute_loss(*inputs, **keywords)

    def training_step(self, *inputs: Any, **keywords: Any) -> Tensor:
        begun = time.perf_counter()
        loss = super().training_step(*inputs, **keywords)
        value = loss.item()  # waits for the device
        self.seconds.append(time.perf_counter() - begun)
        self.folder.append(step=self.state.global_step + 1, loss=value)
        return loss


def spread(rows: PackedRows, count: int) -> Subset[dict[str, Tensor]]:
    """At most ``count`` rows, evenly spread: the same ones for each run."""
    places = torch.linspace(0, len(rows) - 1, min(count, len(rows)))
    return Subset(rows, places.long().tolist())


def train(
    model: nn.Module, label: str, options: argparse.Namespace, rows: dict[str, PackedRows]
) -> FineTuning:
    """Trains ``model`` in the folder of the run, or in one inside of it."""
    path = options.runs / options.name
    folder = RunFolder(path if label == "opfuser" else path / label)
    if not options.resume:
        folder.start_over()
    settings = transformers.TrainingArguments(
        output_dir=str(folder.path),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 20,
        weight_decay=0.1,
        bf16=options.bf16,
        use_cpu=options.cpu,
        seed=options.seed,
        save_steps=options.save_every,
        save_total_limit=2,
        logging_steps=10,
        report_to=["tensorboard"] if options.tensorboard else [],
        dataloader_pin_memory=torch.cuda.is_available() and not options.cpu,
    )
    tuning = FineTuning(
        folder,
        options.recipe if label == "opfuser" else None,
        model=model,
        args=settings,
        train_dataset=rows["train"],
        eval_dataset=spread(rows["validation"], VALIDATED),
    )
    tuning.train(resume_from_checkpoint=options.resume or None)
    return tuning


def results_of(tuning: FineTuning, label: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a run ends with; time is the median of the steps after the first ones."""
    step = statistics.median(tuning.seconds[WARM:] or tuning.seconds or [float("nan")])
    return {
        "label": label,
        "trained_parameters": sum(p.numel() for p in tuning.model.parameters() if p.requires_grad),
        "validation_loss": tuning.evaluate()["eval_loss"],
        "milliseconds_per_step": 1e3 * step,
        "tokens_per_second": options.batch * options.length / step,
    }


def main(argv: list[str] | None = None) -> int:
    options = parse_args(argv)
    transformers.set_seed(options.seed)
    documents = read_documents(options.text)
    if options.model is None:
        tokenizer = train_tokenizer(documents.train, vocabulary=4096)
        model = small_llama(len(tokenizer), options.length)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    rows = {
        name: PackedRows(texts, tokenizer, options.length)
        for name, texts in documents._asdict().items()
    }
    tokens = rows["train"].tokens.numel()
    print(f"{len(documents.train)} documents, {tokens:,} tokens in {len(rows['train'])} rows")
    if options.lora:
        model = with_adapters(model, options.lora)
    twin = copy.deepcopy(model) if options.twin else None

    print(opfuser.hf.apply(model))
    tuning = train(model, "opfuser", options, rows)
    results = [results_of(tuning, "opfuser", options)]
    status = 0
    if twin is not None:
        other = train(twin, "transformers", options, rows)
        results.append(results_of(other, "transformers", options))
        exact = not options.bf16 and options.recipe is None
        status = int(not report_twin(tuning.folder, other.folder, exact))

    opfuser.hf.revert(model)
    path = tuning.folder.path / "model"
    whole = model.merge_and_unload() if options.lora else model
    whole.save_pretrained(path)
    tokenizer.save_pretrained(path)
    tuning.folder.write("results.json", json.dumps(results, indent=1) + "\n")
    for r in results:
        print(
            f"{r['label']}: {r['trained_parameters']:,} trained parameters, validation loss "
            f"{r['validation_loss']:.4f}, {r['milliseconds_per_step']:.1f} ms per step, "
            f"{r['tokens_per_second']:,.0f} tokens/s"
        )
    return status


if __name__ == "__main__":
    sys.exit(main())
