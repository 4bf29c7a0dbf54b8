"""Small tokenizers with chat templates as models have them, for tests: ids by bytes, or a few SentencePiece words."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from spd_jax.data.conversations import Conversation, Message
from spd_jax.weights.tokenizer import Tokenizer as OurTokenizer
from spd_jax.weights.tokenizer import wrap_tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Like Qwen3's: thinking stays in the last answer only.
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for message in messages %}{% if message.role == 'user' %}<s>[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }} </s>{% endif %}{% endfor %}"
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SPECIALS += ("<start_of_turn>", "<end_of_turn>")


def byte_tokenizer(
    template: str | None = CHATML, *, merges: Sequence[tuple[str, str]] = (), adds_begin: bool = False
) -> OurTokenizer:
    """Id b is byte b, the special tokens follow, then the merges; `adds_begin` puts `<s>` first, as Llama's do."""
    spelling = bytes_to_unicode()
    spelt = [tuple("".join(spelling[b] for b in half.encode()) for half in merge) for merge in merges]
    vocabulary = {spelling[b]: b for b in range(256)}
    vocabulary |= {"".join(merge): 256 + len(SPECIALS) + index for index, merge in enumerate(spelt)}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[(left, right) for left, right in spelt]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    named = [AddedToken(text, special=True) for text in SPECIALS]
    fast.add_special_tokens(named)
    if adds_begin:
        begin = fast.token_to_id("<s>")
        fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    inner = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    return wrap_tokenizer(inner, "byte tokenizer")


def word_tokenizer(template: str = LLAMA2) -> OurTokenizer:
    """Words of letters behind a space mark, as SentencePiece writes them; the rest comes out as `<unk>`."""
    words = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz[]/INST", "▁hi", "▁yo"]
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "y"), ("▁y", "o")]
    vocabulary = {word: index for index, word in enumerate([*words, "▁h", "▁y"])}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fast.decoder = decoders.Metaspace(prepend_scheme="first")
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")])
    inner = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    return wrap_tokenizer(inner, "word tokenizer")


def conversation(*texts: str, system: str | None = None, origin: str = "here") -> Conversation:
    """A conversation of user and assistant in turn."""
    turns = [Message(("user", "assistant")[index % 2], text) for index, text in enumerate(texts)]
    return Conversation((*([Message("system", system)] if system else []), *turns), origin)
