"""A ranking loss in the Trainer of Hugging Face transformers: override `compute_loss`.

The model returns an object with `logits`, the scores of lists, (B, N). Batches hold "labels" and a boolean "mask" of
that shape. Pass TrainingArguments(remove_unused_columns=False), or the Trainer drops the mask.
"""

from transformers import Trainer

from recsys_topk.losses import DFTopKLoss


class RankingTrainer(Trainer):
    ranking_loss = DFTopKLoss(k=5)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, mask = inputs.pop("labels"), inputs.pop("mask")
        outputs = model(**inputs)
        loss = self.ranking_loss(outputs.logits, labels, mask)
        return (loss, outputs) if return_outputs else loss
