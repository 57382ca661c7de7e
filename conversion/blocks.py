"""Text as training data: tokens packed into blocks of one length, and the collator that pads the short last one."""

import torch
from torch.utils.data import Dataset

IGNORED = -100  # the label that losses and the Trainer's token count leave out


class PackedBlocks(Dataset):
    """Consecutive blocks of a token stream; documents run on across block borders, separated by end-of-text.

    Args:
        ids: int64 [num_tokens].
        block_size: tokens per block; the last block has what is left, unless that is a single token.

    Raises: ValueError for a block size below 2 or a stream shorter than 2 tokens.
    """

    def __init__(self, ids, block_size):
        if block_size < 2:
            raise ValueError(f"block_size must be at least 2, got {block_size}")
        if len(ids) < 2:
            raise ValueError(f"training text must have at least 2 tokens, got {len(ids)}")
        self.blocks = [block for block in ids.split(block_size) if len(block) > 1]

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return {"input_ids": self.blocks[i]}


def pad_on_the_right(rows, pad_token_id=0):
    """Collate rows of token ids.

    Labels are the ids themselves. Only padding is left out of them, known by its place and not by its id: a real
    end-of-text token stays a label even where it is also the padding token.

    Args: rows: dicts with `input_ids` (a list or an int64 [T]).
    Returns: `input_ids`, `attention_mask` and `labels`, int64 [B, longest].
    """
    sequences = [torch.as_tensor(row["input_ids"], dtype=torch.int64) for row in rows]
    shape = len(sequences), max(len(s) for s in sequences)
    input_ids, labels = torch.full(shape, pad_token_id), torch.full(shape, IGNORED)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    for i, s in enumerate(sequences):
        input_ids[i, : len(s)] = labels[i, : len(s)] = s
        attention_mask[i, : len(s)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
