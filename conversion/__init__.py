"""From GPT-2 checkpoints to any stage of the lineage: converting, fitting, distilling, evaluating."""
