"""NeMo Automodel's contract for context parallelism, with its own code: losses, gradients and token tensors."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install 'startrail[transformers]')")
pytest.importorskip("nemo_automodel", reason="nemo-automodel is not installed (`make test-automodel` does that)")

import torch
import torch.nn.functional as F
from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
from nemo_automodel.components.utils.model_utils import filter_forward_kwargs
from torch.distributed.device_mesh import init_device_mesh

import startrail
from startrail.integrations.automodel import use_sharder
from startrail.integrations.transformers import attach
from startrail.launch.local import run_local
from tests.helpers import error_of
from tests.integrations.tiny import differences, gradients, tiny, tokens

NUMBERS = torch.tensor([[1] * 20 + [2] + [3] * 12 + [0] * 4])  # documents of a packed row, and padding
PLACES = torch.cat([torch.arange(20), torch.zeros(1), torch.arange(12), torch.zeros(4)]).long().unsqueeze(0)


def rows():
    """As Automodel's datasets make them: labels are shifted."""
    ids = tokens(2, 33)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    mask = torch.ones_like(ids)
    mask[1, 25:], labels[1, 24:] = 0, -100
    return dict(input_ids=ids, labels=labels, attention_mask=mask)


def packed():
    ids = tokens(1, 37)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[F.pad(NUMBERS[:, 1:], (0, 1)) != NUMBERS] = -100
    return dict(
        input_ids=ids, labels=labels.masked_fill(NUMBERS == 0, -100), position_ids=PLACES, _packed_seq_ids=NUMBERS
    )


def long():
    """Documents of many lengths, for which ranks are padded, and padding whose positions do not count."""
    lengths = [311, 7, 130, 64, 1, 205, 90, 33, 158, 25]
    numbers = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths, 1)])
    numbers = F.pad(numbers, (0, 40))
    places = torch.cat([torch.arange(length) for length in lengths] + [torch.zeros(40, dtype=torch.long)])
    ids = tokens(1, len(numbers))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[:, (F.pad(numbers[1:], (0, 1)) != numbers) | (numbers == 0)] = -100
    return dict(input_ids=ids, labels=labels, position_ids=places[None], _packed_seq_ids=numbers[None])


def by_position():
    """Documents that only positions tell apart."""
    return {name: x for name, x in packed().items() if name != "_packed_seq_ids"}


def loss_of(model, batch, labels):
    logits = model(**batch, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


CASES = {"rows": rows, "packed": packed, "positions": by_position, "long": long}


def alone(batch):
    """Document by document."""
    model, loss = tiny("llama"), 0.0
    numbers = batch.get("_packed_seq_ids", batch.get("attention_mask", NUMBERS))
    for row in range(len(numbers)):
        for number in set(numbers[row].tolist()) - {0}:
            inside = numbers[row] == number
            loss = loss + loss_of(
                model, dict(input_ids=batch["input_ids"][row, inside][None]), batch["labels"][row, inside]
            )
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("plan", ["1x3", "u2/1x2"])
def test_a_recipe_trains_as_one_process_does(plan):
    torch.set_num_threads(1)
    truths = {name: alone(make()) for name, make in CASES.items()}
    world = startrail.Plan.parse(plan).size

    def on_rank(rank):
        mesh, wrong = init_device_mesh("cpu", (world, 1), mesh_dim_names=("cp", "tp")), []
        for name, make in CASES.items():
            sp = startrail.SequenceParallel(plan, mesh=mesh["cp"])
            model, given = attach(tiny("llama"), sp, check=False), make()
            use_sharder(model, sp)
            found = ContextParallelSharder(model, mesh, dict(given))  # as recipes do
            context, batch = found.shard(dict(given))
            labels, layout = batch.pop("labels"), found.shard_layout
            if name == "long":
                assert layout.padded_seq_len > layout.original_seq_len, "some ranks are padded"
            with context():
                loss = loss_of(model, filter_forward_kwargs(model, batch), labels)
            loss.backward()
            startrail.sum_gradients(model.parameters(), sp.group)
            torch.distributed.all_reduce(whole := loss.detach().clone(), group=sp.group)
            if not abs(whole / truths[name][0] - 1) < 1e-6:
                wrong.append(f"{name}: loss {whole}, one process {truths[name][0]}")
            wrong += [f"{name}: {line}" for line in differences(gradients(model), truths[name][1], 3e-6)]
            values = torch.randn(given["input_ids"].shape, generator=torch.Generator().manual_seed(7))
            local = found.shard_token_tensor(values, fill=0.0)
            dim = 0 if len(values) > 1 else 1
            back = found.gather_token_tensor(local, seq_dim=dim, trim=len(values) == 1)
            back = back[: values.numel()] if len(values) > 1 else back
            if not torch.equal(back.reshape(values.shape), values):
                wrong.append(f"{name}: token tensors do not come back")
        return wrong

    assert run_local(on_rank, world) == [[]] * world


def test_mistakes():
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
        sp = startrail.SequenceParallel("1x2", mesh=mesh["cp"])
        model = tiny("llama")
        found = [error_of(lambda: use_sharder(model, sp))]
        attach(model, sp)
        found.append(error_of(lambda: use_sharder(model, startrail.SequenceParallel("u2", mesh=mesh["cp"]))))
        use_sharder(model, sp)
        shares = startrail.SequenceParallel("1x2", mesh=mesh["cp"], shares=[2, 1])
        uneven = attach(tiny("llama"), shares)
        use_sharder(uneven, shares)
        found.append(error_of(lambda: ContextParallelSharder(uneven, mesh, rows()).shard(rows())))

        def shard(mesh, batch, **options):
            return ContextParallelSharder(model, mesh, batch, **options).shard(batch)

        found.append(error_of(lambda: shard(mesh, dict(rows(), pixel_values=torch.ones(1)))))
        found.append(error_of(lambda: shard(mesh, rows(), num_chunks=2)))
        found.append(error_of(lambda: shard(mesh, dict(rows(), attention_mask=torch.ones(2, 1, 33, 33)))))
        return found

    for late, other, shares, images, chunks, mask in run_local(on_rank, 2):
        assert shares.startswith("ValueError: ranks hold (44, 22) tokens of ")
        assert mask.startswith("ValueError: an attention_mask of 4 dimensions needs _packed_seq_ids")
        assert late == "ValueError: the model is not attached to startrail: attach(model, sp) first"
        assert other.startswith("ValueError: the model is attached to SequenceParallel(1x2, ")
        assert "the batch has pixel_values, which startrail cannot split for Automodel" in images
        assert chunks.startswith("ValueError: 2 chunks per batch: pipeline stages")
