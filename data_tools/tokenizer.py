"""Training a small byte-level BPE for models that start from nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from slimecli import files
from slimecli.errors import UsageError

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHATML = Path(__file__).parent / "templates" / "chatml.jinja"

# letters, single digits, punctuation with a leading space, white space: a digit is always a token of its own, so that
# numbers are spelled the same way wherever they stand
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int, out: Path) -> None:
    """Train a byte-level BPE with ChatML's tokens and template; the folder loads with AutoTokenizer.

    Deterministic. The result has exactly `vocab_size` entries: where the texts hold fewer merges, reserved tokens
    `<|reserved_i|>` fill the rest, so that the size never depends on the data.

    Args:
        texts: contents of messages; the template's role words are counted along with each.
        vocab_size: at least 259: 256 bytes and three special tokens.
        out: folder, made if missing.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    smallest = 256 + 3
    if vocab_size < smallest:
        raise UsageError(
            f"a byte-level vocabulary of {vocab_size} is too small", f"set model.tokenizer_vocab to {smallest} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_roles(texts), trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(missing)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHATML.read_text(encoding="utf-8")
    with files.explain_disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        fast.save_pretrained(out)


def _with_roles(texts: Iterable[str]) -> Iterator[str]:
    """Each content with the role words that ChatML puts around it, so that they become one token each."""
    for text in texts:
        yield text
        yield "user\n"
        yield "assistant\n"
