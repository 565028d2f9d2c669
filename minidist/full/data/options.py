"""The options of the text."""

from dataclasses import dataclass

from minidist.full.options import AT_LEAST_ONE, FRACTION, option


@dataclass(frozen=True)
class DataOptions:
    """What is trained on."""

    text: tuple[str, ...] = option(
        (),
        "files, or folders of them: text, .jsonl, .parquet; none: the documentation inside Python",
    )
    text_field: str = option("text", "what holds the text: a field of .jsonl, a column of .parquet")
    tokenizer: str = option("", "a tokenizer.json; none: one token a byte")
    sequence: int = option(128, "tokens a sequence", AT_LEAST_ONE)
    batch: int = option(16, "sequences a step, over all ranks", AT_LEAST_ONE)
    by_length: bool = option(False, "train on paragraphs, those of similar length together")
    pack: bool = option(
        False, "train on paragraphs, several in a row, each of which attends to itself alone"
    )
    held_out: float = option(0.05, "fraction of the text kept for measuring", FRACTION)
    eval_text: tuple[str, ...] = option(
        (), "files to measure on, as those of --text, in place of its end"
    )

    @property
    def by_document(self) -> bool:
        """Whether the text is cut where a paragraph ends."""
        return self.by_length or self.pack
