"""The drivers' packages, and how each driver is changed by hand to train in another precision.

A precision without an entry is the driver's own. `SEEDED` precedes each driver, which draws the same numbers then.
By hand autocast is around model and loss. castwise has a loss that is not torch's in float32, as docs/own-script.md says:
`NARROW` is the same with autocast around the model alone.
"""

SEEDED = "import random, numpy, torch; random.seed(0); numpy.random.seed(0); torch.manual_seed(0); "
NARROW = "bf16-mixed, loss in float32"
AUTOCAST = 'torch.autocast("cpu", torch.bfloat16)'


def around(*expressions: str) -> list[tuple[str, str]]:
    """Put autocast around expressions."""
    return [(each, f"{AUTOCAST}(lambda: {each})()") for each in expressions]


def first(line: str) -> list[tuple[str, str]]:
    """Put a line before all others."""
    return [(SEEDED, f"{SEEDED}{line}; ")]


def bf16(*changes: tuple[str, str]) -> dict[str, list[tuple[str, str]]]:
    return {"bf16-mixed": list(changes)}


def fp32(*changes: tuple[str, str]) -> dict[str, list[tuple[str, str]]]:
    return {"fp32": list(changes)}


_TRAINER = ("Arguments(output_dir", "Arguments(bf16=True, use_cpu=True, output_dir")
_FASTAI = "import fastai.callback.fp16 as f; f.autocast = lambda *_, **__: torch.autocast('cpu', torch.bfloat16)"
_WIDE = ('from_pretrained("data/llama-bf16")', 'from_pretrained("data/llama-bf16", dtype="float32")')

DRIVERS: dict[str, tuple[str, dict[str, list[tuple[str, str]]]]] = {
    "hf_trainer.py": ("transformers", bf16(_TRAINER)),
    "hf_trainer_bf16.py": ("transformers", fp32(_WIDE) | bf16(_WIDE, _TRAINER)),
    "peft_lora.py": ("peft", fp32(('"bfloat16"', '"float32"')) | bf16(_TRAINER)),
    "trl_sft.py": ("trl", fp32(("use_cpu", "bf16=False, use_cpu"))),
    "trl_cli.sh": ("trl", bf16(("--bf16 False", "--bf16 True --use_cpu True"))),
    "accelerate_loop.py": ("accelerate", bf16(("Accelerator()", 'Accelerator(mixed_precision="bf16")'))),
    "accelerate_launch.sh": ("accelerate", fp32(("--mixed_precision bf16", "--mixed_precision no"))),
    "lightning_trainer.py": ("lightning", bf16(("L.Trainer(", 'L.Trainer(precision="bf16-mixed", '))),
    "fabric_loop.py": ("lightning", fp32(('precision="bf16-mixed"', 'precision="32-true"'))),
    "fastai_fit.py": ("fastai", bf16(*first(_FASTAI), ("error_rate)", "error_rate).to_bf16()"))),
    "fastai_fp16.py": (
        "fastai",
        fp32((".to_fp16()", "")) | bf16(*first(_FASTAI), (".to_fp16()", ".to_bf16()")),
    ),
    "keras_torch.py": ("keras", bf16(("model = ", 'keras.config.set_dtype_policy("mixed_bfloat16"); model = '))),
    "ignite_loop.py": (
        "pytorch-ignite",
        bf16(
            (
                "trainer = ",
                f"model.forward, criterion = {AUTOCAST}(model.forward), {AUTOCAST}(criterion.forward); trainer = ",
            )
        ),
    ),
    "monai_unet.py": (
        "monai",
        bf16(*around('loss_function(model(batch["img"]), batch["seg"])'))
        | {NARROW: [('model(batch["img"])', f'{AUTOCAST}(model)(batch["img"]).float()')]},
    ),
    "open_clip.sh": ("open-clip-torch", fp32(("amp_bf16", "fp32"))),
    "yolo.sh": ("ultralytics", {}),
    "yolo_api.py": (
        "ultralytics",
        bf16(
            (
                "results = ",
                'model.add_callback("on_train_start", lambda trainer: setattr(trainer, "amp", True)); results = ',
            )
        ),
    ),
    "sbert_trainer.py": ("sentence-transformers", bf16(_TRAINER)),
    "smp_loop.py": (
        "segmentation-models-pytorch",
        bf16(
            (
                "logits = model(image); loss = loss_fn(logits, mask)",
                f"logits, loss = {AUTOCAST}(lambda: (out := model(image), loss_fn(out, mask)))()",
            )
        )
        | {NARROW: [("model(image)", f"{AUTOCAST}(model)(image).float()")]},
    ),
    "pyg_graphs.py": (
        "torch-geometric",
        bf16(*around("F.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)")),
    ),
    "diffusers_uncond.py": ("diffusers", bf16(("Accelerator(", 'Accelerator(mixed_precision="bf16", '))),
    "timm_loop.py": ("timm", fp32(('with torch.autocast("cpu", dtype=torch.bfloat16): ', ""))),
    "tv_detection.py": ("torchvision", bf16(*around("model(list(images), list(targets))"))),
    "skorch_fit.py": (
        "skorch",
        bf16(
            (
                "net = NeuralNetClassifier(",
                "own = NeuralNetClassifier; "
                f"net = type('Net', (own,), {{name: {AUTOCAST}(getattr(own, name)) for name in ('infer', 'get_loss')}})(",
            )
        )
        | {
            NARROW: [
                (
                    "net = NeuralNetClassifier(",
                    f"infer = {AUTOCAST}(NeuralNetClassifier.infer); net = type('Net', (NeuralNetClassifier,), "
                    "{'infer': lambda *args, **more: infer(*args, **more).float()})(",
                )
            ]
        },
    ),
    "tabnet_fit.py": (
        "pytorch-tabnet",
        bf16(
            (
                "clf = ",
                f"from pytorch_tabnet.tab_network import TabNet; TabNet.forward = {AUTOCAST}(TabNet.forward); "
                f"TabNetClassifier.compute_loss = {AUTOCAST}(TabNetClassifier.compute_loss); clf = ",
            )
        ),
    ),
    "sb3_ppo.py": (
        "stable-baselines3",
        bf16(
            (
                "model.learn(",
                f"policy = model.policy; policy.evaluate_actions = {AUTOCAST}(policy.evaluate_actions); model.learn(",
            )
        )
        | {
            NARROW: [
                (
                    "model.learn(",
                    "policy, latent = model.policy, model.policy.mlp_extractor\n"
                    f"narrow = lambda own: lambda x: {AUTOCAST}(own)(x).float() if torch.is_grad_enabled() else own(x)\n"
                    "for part in (latent.policy_net, latent.value_net, policy.action_net, policy.value_net): "
                    "part.forward = narrow(part.forward)\nmodel.learn(",
                )
            ]
        },
    ),
    "sb3_dqn.py": (
        "stable-baselines3",
        bf16(
            (
                "model.learn(",
                f"own, target, cast = model.q_net.forward, model.q_net_target.forward, {AUTOCAST}\n"
                "model.q_net.forward = lambda x: cast(own)(x) if torch.is_grad_enabled() else own(x)  # not in rollouts\n"
                "model.q_net_target.forward = cast(target)\nmodel.learn(",
            )
        ),
    ),
    "gpytorch_exact.py": ("gpytorch", bf16(*around("-mll(model(train_x), train_y)"))),
    "pyro_svi.py": ("pyro-ppl", bf16(*around("svi.step(x, y)"))),
    "neuralforecast_fit.py": ("neuralforecast", bf16(("max_steps=250", 'max_steps=250, precision="bf16-mixed"'))),
    "spacy_train.sh": ("spacy", {}),
    "speechbrain_brain.py": ("speechbrain", bf16(("SGD(x, 0.1))", 'SGD(x, 0.1), run_opts={"precision": "bf16"})'))),
    "xtransformers_lm.py": ("x-transformers", bf16(*around("model(next(loader))"))),
    "rechub_ctr.py": (
        "torch-rechub",
        bf16(
            (
                "trainer.fit(",
                f"model.forward, trainer.criterion = {AUTOCAST}(model.forward), {AUTOCAST}(trainer.criterion); "
                "trainer.fit(",
            )
        ),
    ),
    "torchrl_dqn.py": ("torchrl", bf16(*around("loss(rb.sample(128))"))),
    "ddpm_lucidrains.py": ("denoising-diffusion-pytorch", fp32(("amp=True", "amp=False"))),
    "setfit_trainer.py": ("setfit", bf16(*first('import os; os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"'))),
}
