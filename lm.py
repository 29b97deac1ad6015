"""The language model: prompt to token ids, ids to logits, logits to the next id.

    encode(messages) -> ids -> prefill(row, ids) -> logits -> choose -> id -> text
                                                      ^                  |
                                                      +-- decode(rows, ids) <- one id a row

The cache. For each token it has read, a transformer computes one key and one value per layer and
head, and never changes them. They are kept in `rows` preallocated rows as long as the context:

    row 0  [k k k k k k . . . . . .]   length 6     prefill appends many tokens to one row,
    row 1  [. . . . . . . . . . . .]   length 0     decode appends one token to each of many rows,
    row 2  [k k k k k k k k k . . .]   length 9     truncate forgets a row's end, or all of it

A decode takes all its rows through the weights in one pass. The weights are read from memory once
however many rows share the pass, so sixteen rows cost less than twice as much as one.

Arithmetic. A sum of rounded numbers depends on the order of its terms, and matrix products choose
their order by the number of rows: logits differ in their last bits between a pass of one row and a
pass of five. In float32 that is far below the gap between two likeliest ids, in bfloat16 ids do
change places. With `fixed` set every decode runs with all rows, idle ones too, and a sequence's
logits are then bit for bit the same in any row, whatever the other rows hold, if it was prefilled
in the same portions.

This is the only file that imports torch and transformers.

Not here: which row serves whom, and when (`engine.py`); chats and text to ids and back
(`tokenizer.py`); penalties, filters and draws (`sampling.py`); what a JSON schema allows
(`constraint.py`); where the weights come from
(`weights.py`); the layers' arithmetic, which is transformers', so that other models than the
default work too; attention windows shorter than a row, and layers that keep a state instead of keys
and values.

Read next: `generation.py`.
"""

import inspect
import math
import os
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

# Threads wait for each other some 300 times a step. By default they spin for milliseconds, which
# is fastest on an idle machine and fifty times slower once another process wants one of the cores:
# the one waited for is not running. Spinning for microseconds is as fast and bears company.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

import torch
import transformers
from tokenizers import pre_tokenizers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer

import sampling
import weights
from constraint import SchemaConstraint, Vocabulary
from tokenizer import ChatTokenizer, Message
from weights import ModelError

__all__ = ["LanguageModel", "Logits", "ModelError"]

# Attention reads the cache up to the longest row of a step, rounded up to a multiple of this.
BLOCK = 64


class LanguageModel:
    """A causal language model, its tokenizer and its cache rows.

    `encode`, `text` and `constraint` are safe in any thread; the rest is for one at a time.
    """

    def __init__(
        self, network: Any, tokenizer: Any, *, name: str, rows: int, context: int | None
    ) -> None:
        config = network.config.get_text_config()
        self.name = name
        self.rows = rows
        self.context = _context(config, context)
        self.device = str(network.device)
        self.dtype = str(network.dtype).removeprefix("torch.")
        self.vocabulary: int = config.vocab_size
        self.eos_ids = _eos_ids(network, tokenizer)
        self.fixed = False
        layers, heads, size = cache_shape(config)
        self.bytes_per_token = cache_bytes_per_token(config, network.dtype.itemsize)
        # One column more than the context: what a row writes that only makes up the number.
        shape = (rows, heads, self.context + 1, size)
        self._cache = RowCache(layers, shape, network.dtype, self.device)
        self._lengths = [0] * rows
        self._network = network
        self._tokenizer = ChatTokenizer(tokenizer)
        self._vocabulary = Vocabulary(tokenizer, self.eos_ids)
        # transformers renames the argument, model by model.
        renamed = "cache" in inspect.signature(network.forward).parameters
        self._cache_argument = "cache" if renamed else "past_key_values"

    @classmethod
    def load(
        cls,
        model: str = "default",
        *,
        device: str = "auto",
        dtype: str = "auto",
        rows: int = 16,
        context: int | None = 2048,
        kv_memory: int | None = None,
        threads: int | None = None,
    ) -> "LanguageModel":
        """Load a model: "default", a folder, a `.gguf` file or a hub id.

        `context` is a row's length in tokens, cut to what the model was made for; None asks for
        all of that. Rows that do not fit into `kv_memory` bytes are left out. `threads` defaults
        to torch's choice, one a core. Raises ModelError.
        """
        device = _device(device)
        number_type = _dtype(dtype, device)
        if threads is not None:
            torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            name, source = _source(model)
            local = isinstance(source, Path)
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
            network: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype=number_type, local_files_only=local
            )
            network.eval().to(device)
        except ModelError:
            raise
        except Exception as error:  # As many kinds as ways to be wrong.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"cannot load model {model} on {device} ({reason}): "
                "give a folder as transformers saves it, a .gguf file, or a hub id while online"
            ) from error
        if kv_memory is not None:
            row_bytes = _row_bytes(network, context)
            rows = min(rows, kv_memory // row_bytes)
            if rows == 0:
                raise ModelError(
                    f"one row takes {row_bytes:,} bytes of cache and {kv_memory:,} are allowed: "
                    "allow more (--kv-memory) or take a shorter context (--context)"
                )
        return cls(network, tokenizer, name=name, rows=rows, context=context)

    def encode(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the ids of a text to be continued, or of a chat up to where its reply begins.

        Raises ValueError, with a sentence fit for the client, on what is no chat or no text.
        """
        return self._tokenizer.encode(prompt)

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens left out, nothing else added or tidied."""
        return self._tokenizer.text(ids)

    def prefill(self, row: int, ids: Sequence[int]) -> "Logits":
        """Append `ids` to a row, after what it holds; return the logits for what follows them."""
        if not ids:
            raise ValueError("no ids to prefill")
        self._claim([row], len(ids))
        tensor = self._forward([row], [list(ids)], [self._lengths[row]])
        self._lengths[row] += len(ids)
        return Logits(tensor, [row])

    def decode(self, rows: Sequence[int], ids: Sequence[int]) -> "Logits":
        """Append `ids[i]` to row `rows[i]`, for all i in one pass; line i is for rows[i]."""
        given = dict(zip(rows, ids, strict=True))
        if not given or len(given) != len(rows):
            raise ValueError("decode takes one id for each of one or more different rows")
        self._claim(rows, 1)
        step = range(self.rows) if self.fixed else rows
        # An idle row takes part with id 0, written to the spare column.
        starts = [self._lengths[row] if row in given else self.context for row in step]
        tensor = self._forward(step, [[given.get(row, 0)] for row in step], starts)
        for row in rows:
            self._lengths[row] += 1
        return Logits(tensor[list(rows)] if self.fixed else tensor, rows)

    def truncate(self, row: int, length: int) -> None:
        """Keep a row's first `length` tokens, for a prompt that begins alike; 0 frees the row."""
        if not 0 <= length <= self._lengths[row]:
            raise ValueError(f"row {row} holds {self._lengths[row]} tokens, not {length}")
        self._lengths[row] = length

    def choose(
        self,
        logits: "Logits",
        index: int,
        params: sampling.Sampling,
        history: Sequence[int],
        random: random.Random,
        allowed: sampling.Ids | None = None,
    ) -> int:
        """Return the next id for line `index`; `history` is the ids so far, prompt included.

        It is one of `allowed`, as a constraint gives them, if that is not None. Greedy at
        temperature 0; otherwise one number is drawn from `random`. Raises RuntimeError when the
        model has computed something that is not a number.
        """
        highest, best = logits.best(index)
        if not math.isfinite(highest):
            # What is no number spreads by attention: leave none for the row's next user to read.
            self._cache.clear(logits.rows[index])
            raise RuntimeError("the model computed logits that are not finite numbers")
        if params.temperature == 0 and params.repetition_penalty == 1 and allowed is None:
            return best
        return sampling.choose(logits.line(index), params, history, random, allowed)

    def constraint(self, schema: Mapping[str, Any]) -> SchemaConstraint:
        """Return what keeps one reply to a JSON schema; ValueError when nothing can."""
        return self._vocabulary.constraint(schema)

    def logprobs(
        self, logits: "Logits", index: int, token: int, count: int
    ) -> list[tuple[int, float]]:
        """Return `token`, then the `count` likeliest ids of line `index`, with log probabilities.

        They are of the model's own distribution: no temperature, no filter, no constraint.
        """
        return sampling.logprobs(logits.line(index), token, count)

    def token(self, id: int) -> tuple[str, bytes]:
        """Return a token as text, or a special one's name, and the bytes it adds to a reply."""
        raw = self._vocabulary.raw(id)
        has_text = self.text([id, id]) != ""  # Two: a text's first space is sometimes dropped.
        return raw.decode(errors="replace"), raw if has_text else b""

    def _claim(self, rows: Sequence[int], count: int) -> None:
        longest = max(self._lengths[row] for row in rows) + count
        if longest > self.context:
            raise ValueError(f"a row holds {self.context} tokens, not {longest}")

    @torch.inference_mode()
    def _forward(
        self, rows: Sequence[int], ids: list[list[int]], starts: list[int]
    ) -> torch.Tensor:
        """Run equally many ids a row through the model, each row from its start; [rows, ids]."""
        count = len(ids[0])
        columns = torch.tensor(starts)[:, None] + torch.arange(count)
        longest = max(start for start in starts if start < self.context) + count
        limit = min(-(-longest // BLOCK) * BLOCK, self.context)
        allowed = torch.arange(limit) <= columns[:, :, None]  # A token attends to itself and back.
        columns = columns.to(self.device)
        self._cache.select(rows, columns, limit)
        # The fast attention kernel's last bits depend on which thread a row falls to.
        with sdpa_kernel(SDPBackend.MATH) if self.fixed else nullcontext():
            output = self._network(
                input_ids=torch.tensor(ids, device=self.device),
                position_ids=columns,
                attention_mask=self._mask(allowed[:, None]),
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: self._cache},
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _mask(self, allowed: torch.Tensor) -> torch.Tensor:
        """Return a mask [rows, 1, tokens, limit] as the model's attention code takes it."""
        if self._network.config._attn_implementation != "sdpa":  # Others add it to their scores.
            number_type = self._network.dtype
            lowest = torch.finfo(number_type).min
            allowed = torch.zeros(allowed.shape, dtype=number_type).masked_fill(~allowed, lowest)
        return allowed.to(self.device)


class Logits:
    """The scores of every possible next id: a line for each row of the pass that computed them."""

    def __init__(self, tensor: torch.Tensor, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        self._tensor = tensor
        self._best: list[tuple[float, int]] = []
        self._lines: sampling.Floats | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def best(self, index: int) -> tuple[float, int]:
        """Return a line's highest logit and its id, the lowest id of equals."""
        if not self._best:  # In one go for the whole step; torch's max returns the first of equals.
            values, ids = self._tensor.max(dim=-1)
            self._best = list(zip(values.tolist(), ids.tolist(), strict=True))
        return self._best[index]

    def line(self, index: int) -> sampling.Floats:
        """Return a line as float32 numbers on the host; not to be written to."""
        if self._lines is None:
            self._lines = self._tensor.float().cpu().numpy()
        line: sampling.Floats = self._lines[index]
        return line


class RowCache:
    """Keys and values of all rows, given to the model in the place of transformers' own cache.

    `select` says which rows a pass is for; then the model calls `update` once a layer.
    """

    def __init__(
        self, layers: int, shape: tuple[int, ...], number_type: torch.dtype, device: str
    ) -> None:
        self._layers = [
            (_zeros(shape, number_type, device), _zeros(shape, number_type, device))
            for _ in range(layers)
        ]
        self._scratch = _zeros(shape, number_type, device), _zeros(shape, number_type, device)

    def select(self, rows: Sequence[int], columns: torch.Tensor, limit: int) -> None:
        """Write at `columns` [rows, tokens] of `rows`, attend to the columns below `limit`."""
        self._rows = torch.tensor(list(rows), device=columns.device)
        self._columns = columns
        self._limit = limit
        side_by_side = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._span = slice(rows[0], rows[0] + len(rows)) if side_by_side else None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values [rows, heads, tokens, head], return what to read."""
        all_keys, all_values = self._layers[layer_idx]
        all_keys[self._rows[:, None], :, self._columns] = keys.transpose(1, 2)
        all_values[self._rows[:, None], :, self._columns] = values.transpose(1, 2)
        return self._read(all_keys, self._scratch[0]), self._read(all_values, self._scratch[1])

    def _read(self, cache: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        cache = cache[:, :, : self._limit]
        if self._span is not None:
            return cache[self._span]
        # All layers gather into one scratch, which stays in the processor's own cache; copies in
        # fresh memory would take longer than the attention.
        shape = (len(self._rows), *cache.shape[1:])
        out = scratch.view(-1)[: math.prod(shape)].view(shape)
        return torch.index_select(cache, 0, self._rows, out=out)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Part of a cache's interface; of no use to a model that is told its positions."""
        return 0

    @torch.inference_mode()
    def clear(self, row: int) -> None:
        """Overwrite a row with zeros."""
        for keys, values in self._layers:
            keys[row] = 0
            values[row] = 0


def _zeros(shape: tuple[int, ...], number_type: torch.dtype, device: str) -> torch.Tensor:
    if device != "cpu":
        return torch.zeros(shape, dtype=number_type, device=device)
    # torch writes its zeros; numpy asks the system for zeroed pages, and those take up memory only
    # once they are written to. A cache that never fills is never paid for.
    storage = np.zeros(math.prod(shape) * number_type.itemsize, np.uint8)
    return torch.from_numpy(storage).view(number_type).view(shape)


def _source(model: str) -> tuple[str, Path | str]:
    """Return a model's short name, and the folder or hub id for transformers to load."""
    if model == "default":
        return weights.NAME, weights.default_model(_convert)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {model}: give the path of a .gguf file")
        return path.stem, weights.converted_gguf(path, _convert)
    if path.is_dir():
        return path.resolve().name, path
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):  # A hub id is OWNER/NAME.
        raise ModelError(f"there is no folder {model}: give a folder, a .gguf file or a hub id")
    return model, model


def _convert(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to a folder as transformers saves it."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    place, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        # transformers does not read this field: each digit stands alone, then GPT-2's rule.
        rules = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(rules)
    tokenizer.save_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(place, gguf_file=file)
    with torch.device("meta"):  # The names of the weights are needed, no room for them.
        network: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    loaded = load_gguf_checkpoint(  # type: ignore[no-untyped-call]
        str(gguf), return_tensors=True, model_to_load=network
    )
    # In float32, which holds each 4-bit weight times its scale exactly; bfloat16 would round.
    save_file(loaded["tensors"], folder / "model.safetensors", metadata={"format": "pt"})
    network.generation_config.save_pretrained(folder)
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)


def _device(device: str) -> str:
    """Return the device asked for, or the fastest there is."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if device == "auto":
        return next(name for name, found in there.items() if found)
    kind, _, number = device.partition(":")
    if not there.get(kind, False) or not re.fullmatch("[0-9]{0,3}", number):
        found = ", ".join(name for name in there if there[name])
        raise ModelError(f"there is no device {device} here: choose auto, {found}")
    return device


def _dtype(dtype: str, device: str) -> torch.dtype:
    """Return the type asked for, or the one that the device is fastest with."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype in named:
        return named[dtype]
    if dtype != "auto":
        raise ModelError(f"there is no dtype {dtype}: choose auto, {', '.join(named)}")
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device == "mps":
        return torch.float16
    # bfloat16 is half the bytes to read, but on an Intel processor without a matrix unit (AMX)
    # torch's products of it are the slower ones, by a third for one row.
    can = torch.cpu.get_capabilities()
    vectors = can.get("avx512_bf16") and "Intel" not in can.get("cpu_name", "")
    return torch.bfloat16 if can.get("amx_bf16") or vectors else torch.float32


def cache_shape(config: Any) -> tuple[int, int, int]:
    """Return a model's layers, key/value heads and head size."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, size


def cache_bytes_per_token(config: Any, itemsize: int) -> int:
    """Return what one token takes: a key and a value, in every layer, for every key/value head."""
    return 2 * math.prod(cache_shape(config)) * itemsize


def _row_bytes(network: Any, context: int | None) -> int:
    config = network.config.get_text_config()
    return _context(config, context) * cache_bytes_per_token(config, network.dtype.itemsize)


def _context(config: Any, wanted: int | None) -> int:
    """Return the length of a row: what was wanted, if every layer can attend to all of it."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{config.model_type} keeps more than keys and values: choose another")
    limits = [config.max_position_embeddings, wanted or config.max_position_embeddings]
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        limits.append(config.sliding_window)
    return int(min(limits))


def _eos_ids(network: Any, tokenizer: Any) -> frozenset[int]:
    """Return every id that ends a reply, by the model's settings or by its tokenizer's."""
    configured = network.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
