"""inject, remove, trainable: what they change, what they leave, and what they refuse."""

import copy
import json
import pickle
import warnings

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import oqc
from oqc.analysis import overlap
from oqc.integrations.injected import Injected
from oqc.integrations.injection import inject, remove, specification, trainable
from oqc.nn import KINDS


def vit(**options):
    torch.manual_seed(0)
    options = {"img_size": 32, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5, **options}
    return timm.create_model("vit_tiny_patch16_224", **options).eval()


X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("complement", KINDS)
def test_every_kind_starts_as_identity_and_differs_with_the_papers_start(complement):
    model = vit()
    before = model(X)
    inject(model, complement, rank=8)
    assert torch.equal(model(X), before)
    remove(model)
    inject(model, complement, rank=8, init="paper")
    assert not torch.allclose(model(X), before, atol=1e-6)
    assert "alpha" not in "".join(model.state_dict())


@pytest.mark.parametrize("complement", KINDS)
def test_alpha_has_a_gradient_at_once_and_everything_after_one_step(complement):
    model = vit()
    inject(model, complement, rank=8)
    branch = {n: p for n, p in model.named_parameters() if ".complement." in n}
    optimizer = torch.optim.SGD(branch.values(), lr=1.0)
    model(X).square().mean().backward()
    for name, parameter in branch.items():
        assert (parameter.grad.abs().sum() > 0) == name.endswith("alpha"), name
    optimizer.step()
    optimizer.zero_grad()
    model(X).square().mean().backward()
    assert all(p.grad.abs().sum() > 0 for p in branch.values())


def test_injected_network_follows_the_literal_equations():
    model = vit().double()
    inject(model, "lowrank", rank=8, init="paper", backend="torch")
    want = copy.deepcopy(model)
    for block in want.blocks:
        block.mlp.oqc_backend = "reference"
    assert torch.allclose(model(X.double()), want(X.double()), atol=1e-12)


def test_remove_gives_everything_back():
    model = vit()
    before, y = copy.deepcopy(model), model(X)
    modules = [(type(m), list(vars(m))) for m in model.modules()]
    inject(model, "lowrank", rank=4, init="paper")
    assert not torch.equal(model(X), y)
    remove(model)
    assert [(type(m), list(vars(m))) for m in model.modules()] == modules
    assert list(model.state_dict()) == list(before.state_dict())
    assert torch.equal(model(X), y)
    with pytest.raises(ValueError, match="VisionTransformer has no injected complement"):
        remove(model)


def test_deep_vit_takes_a_complement_and_gives_it_back():
    model = oqc.create_model("deep_vit_mlp", depth=2, width=32, heads=2, num_classes=5)
    y = model(X)
    inject(model, "full", rank=4)
    assert torch.equal(model(X), y)
    remove(model)
    assert model.blocks[0].ffn.complement is None


def test_trainable():
    model = vit()
    inject(model, "lowrank", rank=4)
    picked = trainable(model, "complement")
    assert {id(p) for p in picked} == {id(p) for n, p in model.named_parameters() if ".complement." in n}
    assert not model.head.weight.requires_grad
    assert len(trainable(model, "all")) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="part must be one of complement, all"):
        trainable(model, "head")
    with pytest.raises(ValueError, match=r"has no complement to train; call oqc.inject"):
        trainable(vit(), "complement")


def test_trainable_with_a_head():
    model = vit()
    inject(model, "lowrank", rank=4)
    picked = {id(p) for p in trainable(model, also=model.head)}
    assert picked == {id(p) for n, p in model.named_parameters() if ".complement." in n or n.startswith("head.")}
    assert {id(p) for p in trainable(model, also=(model.head, model.norm))} == picked | {
        id(p) for p in model.norm.parameters()
    }
    for also, got in ((None, "NoneType"), (5, "int"), (["head"], "str"), (list(model.head.parameters()), "Parameter")):
        with pytest.raises(ValueError, match=rf"^also must be a module, such as model\.head, or several, got {got}$"):
            trainable(model, also=also)


def test_trainable_with_a_head_that_is_not_of_the_model():
    model, head = vit(), torch.nn.Linear(32, 5)
    head.weight.requires_grad_(False)
    inject(model, "lowrank", rank=4)
    picked = trainable(model, also=head)
    assert {id(p) for p in picked} == {id(p) for p in (*trainable(model), *head.parameters())}
    assert all(p.requires_grad for p in picked)
    assert {id(p) for p in head.parameters()} <= {id(p) for p in trainable(model, "all", also=head)}


def test_trainable_leaves_frozen_what_others_froze():
    model = vit()
    model.pos_embed.requires_grad_(False)
    inject(model, "lowrank", rank=4)
    everything = [p for n, p in model.named_parameters() if n != "pos_embed"]
    for one in (model, copy.deepcopy(model)):
        assert len(trainable(one, "all")) == len(everything)
        trainable(one)
        trainable(one)  # again: what is frozen already is still remembered
        clone = copy.deepcopy(one)
        assert len(trainable(clone, "all")) == len(everything)
        assert not clone.pos_embed.requires_grad


@pytest.mark.parametrize("freeze", [trainable, oqc.integrations.fold])
def test_remove_thaws_what_was_frozen_with_the_complement(freeze):
    model = vit()
    model.pos_embed.requires_grad_(False)
    before = [(type(m), list(vars(m))) for m in model.modules()]
    inject(model, "lowrank", rank=4)
    freeze(model)
    assert not model.head.weight.requires_grad
    remove(model)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["pos_embed"]
    assert [(type(m), list(vars(m))) for m in model.modules()] == before


def test_a_refused_example_thaws_nothing():
    model = vit()
    inject(model.blocks[0], rank=4)
    trainable(model)
    with pytest.raises(ValueError, match=r"example of shape \[1, 3\] does not run through Block"):
        inject(model.blocks[1], rank=4, example=X[:1, :, 0, 0])
    assert not any(parameter.requires_grad for parameter in model.blocks[1].parameters())
    assert not isinstance(model.blocks[1].mlp, Injected)


def test_a_folded_model_is_not_for_training():
    model = vit()
    inject(model, "lowrank", rank=4)
    oqc.integrations.fold(model)
    for part in ("complement", "all"):
        with pytest.raises(ValueError, match="VisionTransformer is folded, which is for inference alone: train one"):
            trainable(model, part)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_plain_checkpoint_does_not_meet_a_trained_branch_unseen():
    plain, model = vit(), vit()
    inject(model, "lowrank", rank=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(plain.state_dict())  # adds nothing yet
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.complement.alpha.fill_(0.5)
    with pytest.warns(UserWarning, match="holds nothing of a complement, which keeps the weights that it has"):
        model.load_state_dict(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("blocks", "picked"), [("all", [0, 1, 2]), (slice(1, None), [1, 2]), ([0, -1], [0, 2]), (range(2), [0, 1])]
)
def test_blocks(blocks, picked):
    model = vit()
    report = inject(model, rank=4, blocks=blocks)
    assert [i for i, block in enumerate(model.blocks) if isinstance(block.mlp, Injected)] == picked
    assert [one.path for one in report.replaced] == [f"blocks.{i}.mlp" for i in picked]
    assert report.left_out == 3 - len(picked)


def test_report():
    model = vit()
    before = sum(p.numel() for p in model.parameters())
    report = inject(model, "lowrank", rank=8, example=X)
    assert report.parameters == sum(p.numel() for p in model.parameters()) - before
    one = 2 * (2 * 32 * 8 + 128 * 8 + 8 * 8 + 8 * 32)  # u and v, P, G, M
    assert report.flops_per_token == 3 * one
    assert report.flops_per_image == 5 * 3 * one  # 4 patches and the class token
    text = str(report)
    assert report.flops_per_batch == 3 * 2 * 128 * 8 * (32 + 8)  # M and G
    assert "in 3 of 3 feed-forward networks" in text
    assert f"{5 * 3 * one:,} an image, {3 * one:,} for a token that passes all of them, 245,760 once a batch" in text
    assert "  blocks.0.mlp to blocks.2.mlp (3): Mlp, 32 -> 128, " in text
    assert "  blocks.0.mlp, blocks.2.mlp: Mlp, 32 -> 128, " in str(inject(vit(), rank=4, blocks=[0, 2]))
    remove(model)
    assert "\n  blocks.1.mlp: Mlp, 32 -> 128, " in str(inject(model, rank=8, blocks=[1]))
    assert not model.training


def test_seed_fixes_the_start_and_blocks_differ():
    first, second, third = vit(), vit(), vit()
    state = torch.get_rng_state()
    for model, seed in ((first, 7), (second, 7), (third, 8)):
        inject(model, rank=4, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    weights = [model.blocks[0].mlp.complement.u.weight for model in (first, second, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], first.blocks[1].mlp.complement.u.weight)


class Quantised(nn.Linear):
    """As int8 layers have it."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features)
        self.weight = nn.Parameter(torch.zeros(linear.weight.shape, dtype=torch.int8), requires_grad=False)


def quantised():
    model = vit()
    model.blocks[1].mlp.fc1 = Quantised(model.blocks[1].mlp.fc1)
    return model


class Packed(nn.Module):
    """As PyTorch's dynamically quantised layers have it: the weight is packed away, behind a method."""

    in_features, out_features = 32, 128

    def weight(self):
        return torch.zeros(128, 32)


def packed():
    model = vit()
    model.blocks[0].mlp.fc1 = Packed()
    return model


def injected():
    model = vit()
    inject(model, rank=4)
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (vit, {"blocks": [3]}, "blocks has 3, but VisionTransformer has 3 feed-forward networks: 0 to 2"),
        (vit, {"blocks": [-4]}, "blocks has -4"),
        (vit, {"blocks": slice(5, 6)}, "picks none of the 3 feed-forward networks of VisionTransformer"),
        (vit, {"blocks": []}, r"blocks \[\] picks none of the 3 .*: 0 to 2"),
        (vit, {"blocks": "every"}, "blocks must be \"all\", a slice or a list of whole numbers, got 'every'"),
        (vit, {"blocks": 0}, 'blocks must be "all", a slice or a list of whole numbers, got 0'),
        (vit, {"blocks": None}, "blocks must be .*, got None"),
        (vit, {"blocks": [True, False]}, "blocks must be .*, got .True, False"),
        (vit, {"blocks": ["blocks.0.mlp"]}, "blocks must be .*, got .'blocks.0.mlp'"),
        (vit, {"rank": 4.0}, "rank must be a whole number, got 4.0"),
        (vit, {"rank": "8"}, "rank must be a whole number, got '8'"),
        (vit, {"gate_init": "a"}, "gate_init must be a finite number, got 'a'"),
        (vit, {"gate_init": float("nan")}, "gate_init must be a finite number, got nan"),
        (vit, {"seed": -1}, "seed must be a whole number from 0 on, got -1"),
        (vit, {"seed": 1.5}, "seed must be a whole number from 0 on, got 1.5"),
        (vit, {"example": torch.zeros(1, 3, 5, 5)}, r"example of shape \[1, 3, 5, 5\] does not run through"),
        (vit, {"example": X[:0]}, r"example must hold an input or several, got one of shape \[0, 3, 32, 32\]"),
        (vit, {"example": "a"}, "example must be None or a tensor, an input of the model, got a str"),
        (vit, {"eps": "x"}, "eps must be more than 0 and finite, got 'x'"),
        (vit, {"eps": -1.0}, "eps must be more than 0 and finite, got -1.0"),
        (vit, {"rank": 129}, "rank must be from 1 to the hidden width 128 of blocks.0.mlp, got 129"),
        (vit, {"rank": 0}, "rank must be from 1"),
        (vit, {"complement": "none"}, "complement must be one of full"),
        (vit, {"init": "zero"}, "init must be one of paper, identity"),
        (quantised, {}, r"VisionTransformer is quantised: blocks.1.mlp.fc1 \(Quantised\); inject .* before quantising"),
        (packed, {}, r"VisionTransformer is quantised: blocks.0.mlp.fc1 \(Packed\)"),
        (injected, {}, r"VisionTransformer has a complement already, in blocks.0.mlp; call oqc.remove\(model\) first"),
        (
            lambda: oqc.create_model("deep_vit_mlp_lowrank_r56"),
            {},
            "DeepViT has a complement already, in blocks.0.ffn; it was built with it",
        ),
        (lambda: timm.create_model("resnet18"), {}, "ResNet has no feed-forward network of a known form"),
        (lambda: nn.Linear(4, 4), {}, "Linear has no feed-forward network"),
    ],
)
def test_refusals_name_the_fault_and_change_nothing(make, options, message):
    model = make()
    before = list(model.state_dict())
    with pytest.raises(ValueError, match=message):
        inject(model, **{"rank": 4, **options})
    assert list(model.state_dict()) == before


def test_what_is_not_a_model_is_named():
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got str"):
        inject("vit_small_patch16_224")
    for call in (remove, trainable, lambda model: oqc.save(model, "somewhere")):
        with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, got OrderedDict"):
            call(vit().state_dict())


def test_numpys_numbers_are_taken():
    model, twin = vit(), vit()
    inject(
        model,
        rank=np.int64(4),
        blocks=np.array([0, -1]),
        gate_init=np.float32(0.5),
        eps=np.float64(1e-5),
        seed=np.int64(3),
    )
    inject(twin, rank=4, blocks=[0, -1], gate_init=0.5, eps=1e-5, seed=3)
    assert json.dumps(specification(model)) == json.dumps(specification(twin))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


class Functional(nn.Module):
    """A forward that calls its activation as a function, and uses one dropout twice."""

    def __init__(self):
        super().__init__()
        self.down, self.drop, self.up = nn.Linear(32, 16), nn.Dropout(0.3), nn.Linear(16, 32)

    def forward(self, x):
        return self.drop(self.down(self.drop(F.silu(self.up(x)))))


class Normed(nn.Module):
    """Norm first and a gated pair in an order of its own."""

    def __init__(self):
        super().__init__()
        self.w_up, self.w_gate, self.w_out = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.act, self.norm = nn.GELU(), nn.LayerNorm(16)

    def forward(self, x):
        x = self.norm(x)
        return self.w_out(self.w_up(x) * self.act(self.w_gate(x)))


class Shifted(nn.Module):
    """Looks like an MLP, but is not."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)).roll(1, dims=1))


def sequential():
    return nn.Sequential(
        nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.Dropout(0.2)
    )


@pytest.mark.parametrize("make", [Functional, Normed, sequential])
@pytest.mark.parametrize("training", [False, True])
def test_generic_networks(make, training):
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).train(training)
    x = torch.randn(2, 5, 16)
    torch.manual_seed(1)
    before = model(x)
    assert len(inject(model, "lowrank", rank=4).replaced) == 2
    torch.manual_seed(1)
    assert torch.equal(model(x), before)
    for part in model:
        nn.init.ones_(part.complement.alpha)
    torch.manual_seed(1)
    assert not torch.allclose(model(x), before)


@pytest.mark.parametrize(
    "make",
    [
        lambda act: timm.layers.Mlp(16, 32, act_layer=act),
        lambda act: timm.layers.GluMlp(16, 64, act_layer=act, gate_last=False),
        lambda act: timm.layers.GluMlp(16, 64, act_layer=act),
        lambda act: timm.layers.SwiGLU(16, 32, act_layer=act),
    ],
)
@torch.no_grad()
def test_an_activation_in_place_leaves_a_shared_projection_its_maps(make):
    x = torch.randn(2, 5, 16)
    outputs = []
    for act in (nn.ReLU, lambda: nn.ReLU(inplace=True)):
        torch.manual_seed(0)
        model = make(act)
        inject(model, "shared", rank=8, init="paper", gate_init=1.0, seed=0)
        outputs += [model(x), model.intermediates(x)[0]]
    assert all(torch.allclose(y, outputs[0], atol=1e-6) for y in outputs)


def test_a_network_that_only_looks_like_one_is_left_alone():
    model = nn.Sequential(Shifted(), sequential())
    report = inject(model, rank=4)
    assert [one.path for one in report.replaced] == ["1"]
    assert [(one.path, one.reason) for one in report.skipped] == [
        ("0", "Shifted does more than a map up, an activation and a map down")
    ]


class Named(nn.Module):
    """A block that calls its network by keyword."""

    def __init__(self):
        super().__init__()
        self.mlp = Hidden()

    def forward(self, x):
        return x + self.mlp(hidden_states=x)


class Hidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, hidden_states):
        return self.fc2(self.act(self.fc1(hidden_states)))


class Scaled(Hidden):
    def forward(self, hidden_states, scale=None):
        y = super().forward(hidden_states)
        return y if scale is None else y * scale


@torch.no_grad()
def test_a_network_called_by_keyword():
    model, x = Named(), torch.randn(2, 3, 16)
    y = model(x)
    one = inject(model, rank=4, example=x)
    assert one.flops_per_image == 3 * one.flops_per_token
    assert torch.equal(model(x), y)
    assert torch.equal(model.mlp(x), model.mlp(hidden_states=x))
    assert overlap(model, [x])["before"] is not None


@torch.no_grad()
def test_what_else_a_network_may_take_is_refused_when_it_is_given():
    model, x = nn.Sequential(Scaled(), Hidden()), torch.randn(2, 3, 16)
    y = model(x)
    assert len(inject(model, rank=4).replaced) == 2
    assert torch.equal(model(x), y)
    said = "Scaled with a complement takes its input, hidden_states, and nothing else, got {} arguments: leave it out"
    for count, (given, named) in enumerate([((), {}), ((), {"tokens": x}), ((x, 2.0), {}), ((x, 2.0), {"scale": 2.0})]):
        with pytest.raises(ValueError, match=said.format(count)):
            model[0](*given, **named)
    with pytest.raises(ValueError, match=said.format(2)):
        model[0](x, hidden_states=x)


def test_attention_pools_and_position_biases_are_left_alone():
    siglip = timm.create_model("vit_base_patch16_siglip_224", img_size=32, embed_dim=32, depth=2, num_heads=2)
    assert [one.path for one in inject(siglip, rank=4).skipped] == ["attn_pool.mlp"]
    swin = timm.create_model(
        "swinv2_tiny_window8_256", img_size=32, embed_dim=16, depths=(1, 1), num_heads=(2, 2), window_size=4
    )
    assert {one.path.split(".")[-1] for one in inject(swin, rank=4).skipped} == {"cpb_mlp"}
    with torch.device("meta"):
        maxvit = timm.create_model("maxvit_rmlp_pico_rw_256")
    report = inject(maxvit, rank=4)
    assert {one.path.split(".")[-2] for one in report.replaced} == {"attn_block", "attn_grid"}
    assert {one.path.split(".", 5)[-1] for one in report.skipped} == {"attn.rel_pos.mlp"}


@pytest.mark.parametrize("run", [lambda m: inject(m, rank=4, example=X), lambda m: overlap(injected_too(m), [X])])
def test_parts_in_evaluation_mode_stay_so(run):
    model = vit().train()
    model.blocks[0].eval()
    model.patch_embed.norm.eval()
    run(model)
    assert model.training
    assert model.blocks[1].mlp.training
    assert not any(part.training for part in (*model.blocks[0].modules(), model.patch_embed.norm))


def injected_too(model):
    inject(model, rank=4)
    return model


def test_only_a_part_of_a_model():
    model = vit()
    report = inject(model.blocks[1], rank=4)
    assert [one.path for one in report.replaced] == ["mlp"]
    assert specification(model)["modules"] == ["blocks.1.mlp"]


def test_hooks_optimizers_copies_and_pickles_survive():
    model = vit()
    seen = []
    model.blocks[0].mlp.register_forward_hook(lambda m, i, o: seen.append(o))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inject(model, rank=4)
    model(X).sum().backward()
    before = model.head.weight.detach().clone()
    optimizer.step()
    assert len(seen) == 1
    assert not torch.equal(model.head.weight, before)
    model.blocks[0].mlp._forward_hooks.clear()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.blocks[0].mlp) is type(model.blocks[0].mlp)
        assert torch.equal(twin(X), model(X))
        remove(twin)
        assert isinstance(model.blocks[0].mlp, Injected)


def test_a_part_of_the_branch_in_a_checkpoint_is_an_error():
    model = vit()
    inject(model, rank=4)
    state = model.state_dict()
    del state["blocks.1.mlp.complement.u.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks.1.mlp.complement.u.weight"):
        model.load_state_dict(state)


@pytest.mark.parametrize("make", [Functional, Normed, sequential])
def test_generic_networks_are_given_back(make):
    torch.manual_seed(0)
    model = nn.Sequential(make(), make()).eval()
    x = torch.randn(2, 5, 16)
    before, names = model(x), list(model.state_dict())
    for _ in range(2):
        inject(model, rank=4, init="paper")
        assert not torch.equal(model(x), before)
        remove(model)
        assert torch.equal(model(x), before)
        assert list(model.state_dict()) == names


class Adapted(nn.Module):
    """As peft's layers have it: a linear layer inside, not one itself."""

    def __init__(self, linear):
        super().__init__()
        self.base_layer, self.in_features, self.out_features = linear, linear.in_features, linear.out_features

    def forward(self, x):
        return self.base_layer(x)


def test_networks_with_adapters_are_named():
    model = vit()
    model.blocks[1].mlp.fc2 = Adapted(model.blocks[1].mlp.fc2)
    for block in model.blocks:
        block.attn.proj = Adapted(block.attn.proj)
    report = inject(model, rank=4)
    assert [one.path for one in report.replaced] == ["blocks.0.mlp", "blocks.2.mlp"]
    assert [one.path for one in report.skipped] == ["blocks.1.mlp"]
    assert "Adapted in place of an nn.Linear (LoRA?): inject before that" in report.skipped[0].reason
    with pytest.raises(ValueError, match=r"left alone: mlp: it has a .*Adapted in place of an nn.Linear"):
        inject(model.blocks[1], rank=4)


def test_a_network_that_cannot_be_copied_is_left_alone():
    """Such as one that keeps what it computed last."""
    model = vit()
    for block in model.blocks[:2]:
        block.mlp.last = model(X)
    report = inject(model, rank=4)
    assert [one.path for one in report.replaced] == ["blocks.2.mlp"]
    assert "blocks.1.mlp, it cannot be copied to find out its form: Only Tensors created" in str(report)


class Clipped(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("most", torch.tensor(6.0))

    def forward(self, x):
        return x.clamp(max=self.most).relu()


def test_a_network_is_tried_with_the_buffers_it_has():
    """With deterministic algorithms PyTorch fills what has no values with NaN."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), Clipped(), nn.Linear(32, 16)), torch.randn(2, 5, 16)
    before = model(x)
    torch.use_deterministic_algorithms(True)
    try:
        assert len(inject(model, rank=4).replaced) == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(model(x), before)


class Chosen(nn.Module):
    """Its activation is a function it was given."""

    def __init__(self, act):
        super().__init__()
        self.fc1, self.fc2, self.f = nn.Linear(16, 32), nn.Linear(32, 16), act

    def forward(self, x):
        return self.fc2(self.f(self.fc1(x)))


def test_networks_that_differ_in_a_function_are_told_apart():
    torch.manual_seed(0)
    model, x = nn.Sequential(Chosen(F.relu), Chosen(F.silu), Chosen(F.relu)), torch.randn(2, 5, 16)
    before = model(x)
    assert len(inject(model, rank=4).replaced) == 3
    assert torch.equal(model(x), before)


def test_a_forward_replaced_on_the_object_is_left_alone():
    """As accelerate's hooks do: the class's forward, which injection changes, would not run."""
    model = nn.Sequential(Chosen(F.relu), Chosen(F.relu))
    inner = model[0].forward
    model[0].forward = lambda x: inner(x)
    report = inject(model, rank=4)
    assert [one.path for one in report.replaced] == ["1"]
    assert "its forward was replaced on the object" in str(report)
    remove(model)
    model[1].forward = model[0].forward
    with pytest.raises(ValueError, match="its forward was replaced on the object"):
        inject(model, rank=4)
