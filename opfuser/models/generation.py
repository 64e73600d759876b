"""Text from decoders: one pass over the prompt, then one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from opfuser import DotProductAttention, KVCache, PositionEmbedding, RotaryEmbedding, Sequential
from opfuser.errors import ArgumentError, InputError, OpfuserError, explain

_POSITIONAL = RotaryEmbedding, PositionEmbedding
_Keywords = dict[nn.Module, dict[str, Any]]
_Parts = tuple[Sequential, Sequential, Sequential]


class _Sampling(NamedTuple):
    """What the next token is drawn from: logits over temperature, of these the top k, then p."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


class _Decoder(NamedTuple):
    """A model without its loss, and what its calls need besides tokens.

    Attributes:
        body, head: the model up to its head, and the rest, which one position of a prompt needs.
        caches: of each attention.
        positional: the operations that take positions.
    """

    model: Sequential
    body: Sequential
    head: Sequential
    caches: dict[DotProductAttention, KVCache]
    positional: list[RotaryEmbedding | PositionEmbedding]


@torch.no_grad()
def generate(  # noqa: PLR0913 - by keyword
    model: Sequential,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    mask: Tensor | None = None,
    generator: torch.Generator | None = None,
    static_cache: bool = False,
    step: Callable[..., Any] | None = None,
) -> Tensor:
    """Generates ``max_new_tokens`` tokens after each prompt.

    The next token is the one with the largest logit, or is drawn from ``softmax(logits /
    temperature)``, restricted by ``top_k`` and then by ``top_p``, in fp32. Each attention has an
    :class:`opfuser.KVCache`. The tokens are those of Hugging Face's ``generate`` with the same
    arguments, and if drawn, with the same seed of torch; there, ``top_k`` may default to 50.

    The model runs in its current mode: call ``model.eval()`` first if it has dropout. The model's
    parts are called, so hooks of the whole model do not run. The host waits for a GPU only for the
    check for ``eos_token_id``, once per token, and for that of ``mask``, once.

    Shapes: tokens ``(batch, prompt)``, int32 or int64; the result ``(batch, prompt +
    max_new_tokens)``, of the same dtype; shorter if all sequences end before.

    Args:
        model: from :func:`decoder_lm`, with or without a loss.
        tokens: the prompts.
        max_new_tokens: 1 or more.
        do_sample: whether tokens are drawn.
        temperature: positive; below 1 the likely tokens become more likely.
        top_k: draw from this many of the most likely tokens, and any that are as likely as the last
            of them; None means all.
        top_p: draw from the fewest most likely tokens whose probabilities sum to ``top_p`` or more
            (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019); None means all.
        eos_token_id: a sequence ends with this token, or with one of these; None means that none
            ends.
        pad_token_id: the token after the end of a sequence in a batch with longer ones; None means
            the first of ``eos_token_id``.
        mask: ``(batch, prompt)`` of bool, True where there is no padding. Padding is on the left:
            positions count from the first real token. None means no padding.
        generator: of the random numbers; None means that of the device.
        static_cache: whether memory for all positions is allocated at the start, so that every
            token has the same shapes.
        step: a function to call instead of the model for each token after the prompt, with the
            tokens ``(batch, 1)`` and ``op_kwargs``, and returns logits: with ``static_cache``,
            ``torch.compile(model, fullgraph=True)`` of a model without a loss. Later calls with as
            many sequences and positions do not compile again.

    Raises:
        ArgumentError: the model is not from :func:`decoder_lm`, not causal, or has too few learned
            positions; or another argument is not as above.
        InputError: the tokens or the mask are not as above.
    """
    sampling = _sampling(do_sample, temperature, top_k, top_p)
    ends, pad = _ends(eos_token_id, pad_token_id)
    length, total = _lengths(tokens, max_new_tokens)
    decoder = _decoder(model, total, static_cache)
    seen, positions, padding = None, None, 0
    last = torch.full((1,), length - 1, device=tokens.device)
    if mask is not None:
        padding = _padding(mask, tokens)
        seen = nn.functional.pad(mask, (0, max_new_tokens), value=True)
        positions = (mask.cumsum(1) - 1).clamp_(min=0)
        last = positions[:, -1:]

    def keywords(positions: Tensor | None) -> _Keywords:
        shown = seen if seen is None or static_cache else seen[:, :length]
        return _op_kwargs(decoder, positions, shown, length - padding)

    result = torch.cat([tokens, tokens.new_zeros(len(tokens), max_new_tokens)], 1)
    ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    call = decoder.model if step is None else step
    hidden = _output(decoder.body(tokens, op_kwargs=keywords(positions)))
    logits = decoder.head(hidden[:, -1:].contiguous())
    while True:
        scores = _output(logits)[:, -1].float()
        token = _choice(scores, sampling, generator).to(tokens.dtype)
        if ends:
            token = token.masked_fill(ended, pad)
            for end in ends:  # a tensor of them would be a copy that waits
                ended |= token == end
        result[:, length] = token
        length += 1
        if length == total or (ends and bool(ended.all())):
            return result[:, :length].contiguous()
        last = last + 1
        logits = call(token[:, None], op_kwargs=keywords(last))


def _decoder(model: Sequential, total: int, static_cache: bool) -> _Decoder:
    names = list(model._modules) if isinstance(model, Sequential) else []
    if not {"embedding", "layers", "head"} <= {*names}:
        received, remedy = type(model).__name__, "Pass the Sequential itself"
        _refuse("The model must be one of decoder_lm", received, remedy)
    attentions = [op for op in model.modules() if isinstance(op, DotProductAttention)]
    if not all(op.causal for op in attentions):
        _refuse("Attention must be causal", "causal=False")
    positional = [op for op in model.modules() if isinstance(op, _POSITIONAL)]
    tables = [op.num_positions for op in positional if isinstance(op, PositionEmbedding)]
    if total - 1 > min(tables, default=total):  # the last token is not read
        received = f"{total - 1} positions to read, {min(tables)} learned ones"
        remedy = "Shorten the prompt or max_new_tokens"
        _refuse("A sequence must not be longer than the table of positions", received, remedy)
    caches = {op: KVCache(total if static_cache else None) for op in attentions}
    return _Decoder(*_parts(model, names), caches, positional)


# So that what was planned and recorded for the parts of a model is there in its next call.
_known: WeakKeyDictionary[Sequential, tuple[Any, _Parts]] = WeakKeyDictionary()


def _parts(model: Sequential, names: list[str]) -> _Parts:
    """The model without its loss, the model up to its head, and the rest."""
    made_of = list(model._modules.items()), model.recipe, model.fusion_config
    known = _known.get(model)
    if known is None or known[0] != made_of:
        end = names.index("loss") if "loss" in names else len(names)
        head = names.index("head")
        known = _known[model] = made_of, (model[:end], model[:head], model[head:end])
    return known[1]


def _op_kwargs(
    decoder: _Decoder, positions: Tensor | None, mask: Tensor | None, length: int
) -> _Keywords:
    """Keywords of a call after which the longest sequence has ``length`` tokens."""
    shared = {} if mask is None else {"mask": mask}
    found: _Keywords = {op: {"cache": cache, **shared} for op, cache in decoder.caches.items()}
    for op in decoder.positional if positions is not None else ():
        found[op] = {"positions": positions}
        scaling = op.scaling if isinstance(op, RotaryEmbedding) else None
        # Frequencies may follow the length of the sequence, which one token does not show.
        counted = None if scaling is None else scaling.counted_length(length)
        if counted is not None:
            found[op]["length"] = counted
    return found


def _output(result: Any) -> Tensor:
    """The output of a call, which may have extra outputs too."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def _choice(
    scores: Tensor, sampling: _Sampling | None, generator: torch.Generator | None
) -> Tensor:
    """The next token of each sequence, by logits (batch, vocab_size)."""
    if sampling is None:
        return scores.argmax(1)
    temperature, top_k, top_p = sampling
    scores = scores / temperature
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ascending, order = scores.sort(1)
        unlikely = ascending.softmax(1).cumsum(1) <= 1 - top_p
        unlikely[:, -1] = False
        scores = scores.masked_fill(unlikely.scatter(1, order, unlikely), -torch.inf)
    # As torch.multinomial draws one, which waits for a GPU to check the probabilities.
    waits = torch.empty_like(scores).exponential_(generator=generator)
    return (scores.softmax(1) / waits).argmax(1)


def _sampling(
    do_sample: bool, temperature: float, top_k: int | None, top_p: float | None
) -> _Sampling | None:
    sampling = _Sampling(temperature, top_k, top_p)
    received = f"temperature={temperature}, top_k={top_k}, top_p={top_p}"
    if not do_sample and sampling != _Sampling():
        _refuse("temperature, top_k and top_p are for sampling", received, "Pass do_sample=True")
    if not temperature > 0 or (top_k is not None and top_k < 1):
        _refuse("temperature and top_k must be positive", received)
    if top_p is not None and not 0 < top_p <= 1:
        _refuse("top_p must be above 0 and at most 1", received)
    return sampling if do_sample else None


def _ends(eos_token_id: int | Sequence[int] | None, pad: int | None) -> tuple[list[int], int]:
    """The tokens that end a sequence, and the one that follows them."""
    ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
    if pad is not None and not ends:
        _refuse("pad_token_id is for what follows eos_token_id", f"pad_token_id={pad}")
    return ends, (ends or [0])[0] if pad is None else pad


def _lengths(tokens: Tensor, max_new_tokens: int) -> tuple[int, int]:
    """Positions of the prompts, and of the result."""
    if tokens.dim() != 2 or not tokens.shape[1] or tokens.dtype not in (torch.int32, torch.int64):
        invariant = "tokens must be (batch, prompt) of int32 or int64, and prompts not empty"
        _refuse(invariant, f"{tuple(tokens.shape)} of {tokens.dtype}", error=InputError)
    if max_new_tokens < 1:
        _refuse("max_new_tokens must be positive", f"max_new_tokens={max_new_tokens}")
    return tokens.shape[1], tokens.shape[1] + max_new_tokens


def _padding(mask: Tensor, tokens: Tensor) -> int:
    """How many positions are padding in all prompts."""
    if mask.shape != tokens.shape or mask.dtype != torch.bool:
        received = f"mask {tuple(mask.shape)} of {mask.dtype}, tokens {tuple(tokens.shape)}"
        _refuse("A mask is bool, of the shape of tokens", received, "Pass mask.bool()", InputError)
    most = mask.sum(1).amax() if len(mask) else mask.sum()
    ends, longest = torch.stack([mask[:, -1].all(), most]).tolist()
    if not ends:
        received, remedy = "a mask that ends with False", "Move the padding to the left"
        _refuse("The last token of a prompt must not be padding", received, remedy, InputError)
    return mask.shape[1] - int(longest)


def _refuse(
    invariant: str, received: str, remedy: str = "", error: type[OpfuserError] = ArgumentError
) -> NoReturn:
    raise error(explain(invariant, where="generate", received=received, remedy=remedy))
