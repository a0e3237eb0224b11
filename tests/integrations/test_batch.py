"""``shard_batch``: documents, padding and positions, and the batches that it refuses."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")

import startrail
from startrail.integrations.transformers import attach, shard_batch
from tests.helpers import as_rank, error_of
from tests.integrations.tiny import gradients, packed, padded, tiny, tokens


def test_traps_of_batches():
    sp = startrail.SequenceParallel("1x1")
    model = attach(tiny("llama"), sp)
    ids = tokens(1, 8)
    assert "is attached to startrail: call model(**shard_batch" in error_of(lambda: model(input_ids=ids))
    both = dict(packed(4, 4), attention_mask=torch.ones_like(ids))
    assert "leave the attention_mask out" in error_of(lambda: shard_batch(sp, **both))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    assert "row 0, token 6 has attention_mask 0" in error_of(lambda: shard_batch(sp, ids, ids, mask))
    assert "features cannot be sharded by tokens: it is (1, 3)" in error_of(
        lambda: shard_batch(sp, ids, features=torch.zeros(1, 3))
    )
    text = error_of(lambda: model(**shard_batch(sp, ids, ids, pixel_values=torch.zeros(1, 3))))
    assert "LlamaForCausalLM takes no images" in text
    assert "pass input_ids or inputs_embeds, got neither" in error_of(lambda: shard_batch(sp, labels=ids))
    assert "not both" in error_of(lambda: shard_batch(sp, ids, inputs_embeds=torch.zeros(1, 8, 32)))
    assert "inputs_embeds must be floats (batch, tokens, width)" in error_of(lambda: shard_batch(sp, inputs_embeds=ids))
    assert "use_cache=True" in error_of(lambda: model(**shard_batch(sp, ids), use_cache=True))
    text = error_of(lambda: model(**shard_batch(sp, ids, ids), output_router_logits=True))
    assert "LlamaForCausalLM has no routers' auxiliary loss" in text
    expected = model(**shard_batch(sp, ids, ids), use_cache=False, logits=True)
    embeds = model.get_input_embeddings()(ids)
    made = model(**shard_batch(sp, inputs_embeds=embeds, labels=ids), logits=True)
    assert torch.equal(made.logits, expected.logits) and torch.equal(made.loss, expected.loss)
    assert model(**shard_batch(sp, ids, ids)).logits is None and model(**shard_batch(sp, ids)).logits.shape == (
        1,
        8,
        64,
    )
    for wrong in (ids[0], ids.float(), [[1, 2]]):
        assert "input_ids must be an integer tensor (batch, tokens)" in error_of(lambda: shard_batch(sp, wrong))  # noqa: B023
    three = torch.arange(8).expand(3, 2, 8)
    made = shard_batch(sp, tokens(2, 8), position_ids=three)
    assert made["position_ids"].shape == (3, 2, 8), "mRoPE's"
    made = shard_batch(sp, tokens(2, 8), attention_mask=torch.tensor([[1] * 8, [0] * 3 + [1] * 5]), position_ids=three)
    assert made["position_ids"].shape == (3, 1, 13) and made["startrail"].sequence.documents.tolist() == [0, 8, 13]
    assert made["position_ids"][0, 0].tolist() == [*range(8), *range(3, 8)], "every token keeps its position"
    again = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]).expand(3, 1, 8)
    text = error_of(lambda: shard_batch(sp, ids, position_ids=again))
    assert "position_ids with 3 axes decrease in row 0 at token 4" in text and "pass documents=" in text
    made = shard_batch(sp, ids, position_ids=again, documents=[0, 4, 8])
    assert made["startrail"].sequence.documents.tolist() == [0, 4, 8]
    with_text = torch.cat([again[:1], torch.zeros(3, 1, 8, dtype=torch.long)])  # four axes: the first is the text's
    made = shard_batch(sp, ids, position_ids=with_text)
    assert made["startrail"].sequence.documents.tolist() == [0, 4, 8]
    left = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    made = shard_batch(sp, ids, ids.masked_fill(left == 0, -100), left)
    assert made["startrail"].sequence.documents.tolist() == [0, 1, 7] and made["startrail"].fully_masked.tolist()[0]
    assert made["num_items_in_batch"] == 6, "the first token is learnt from padding that sees nothing"
    hole = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])
    text = error_of(lambda: shard_batch(sp, ids, ids.masked_fill(hole == 0, -100), hole))
    assert "row 0, token 4 has a label, but comes after padding inside the row" in text
    eager = attach(tiny("gemma2"), sp)
    text = error_of(lambda: eager(**shard_batch(sp, ids, ids.masked_fill(left == 0, -100), left)))
    assert "model.layers.0.self_attn: a label is predicted from padding on the left" in text
    text = error_of(lambda: shard_batch(sp, ids, attention_mask=left, blocks=[(2, 4)]))
    assert "documents and blocks need rows with the same documents and positions, and no padding" in text
    made = shard_batch(sp, ids, blocks=[(2, 4)])
    assert made["startrail"].sequence.blocks == ((2, 4),)


def test_the_attention_mask_counts_every_token_once():
    """Trainers add it up over ranks (TRL's num_tokens); a shard's padding is no token."""
    batch = dict(input_ids=tokens(2, 37), attention_mask=torch.ones(2, 37, dtype=torch.long))
    counted = [int(shard_batch(as_rank(rank, 4), **batch)["attention_mask"].sum()) for rank in range(4)]
    assert sum(counted) == 2 * 37


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_batch_without_labels_has_no_loss_and_no_gradients(name, count):
    """Rows of one token have no labels: without them, 0 / 0 would make every gradient NaN."""
    model = attach(tiny(name), startrail.SequenceParallel("1x1"), tile_mlp=5)
    model.gradient_checkpointing_enable()
    loss = model(**shard_batch(model._startrail.sp, **padded([1, 1, 1]), num_items_in_batch=count)).loss
    loss.backward()
    assert loss == 0
    assert all(not x.any() for x in gradients(model).values()), "NaN counts as true"
