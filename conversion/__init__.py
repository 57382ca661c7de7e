"""From GPT-2 checkpoints to any stage of the lineage, and what is needed to get there: fitting, distilling, evaluating."""
