"""Programs as the documentation of other packages shows them, on either device.

In: `Steps` of `wild`, which are told the end of each step, and a size. Each program goes on until its process ends.
Differences to the pages they are from: data are made here, nothing is printed, and dropout is left out, since random
numbers of the device are others than those of the CPU. Programs that draw some all the same say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import torch
from torch import Tensor, nn

PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and the arguments of its sizes."""

    run: Callable[..., None]
    packages: tuple[str, ...]
    sizes: dict[str, dict[str, int]]
    draws: bool


def program(*packages: str, small: dict[str, int], larger: dict[str, int], draws: bool = False) -> Any:
    """Add the function to the programs. `draws`: random numbers of the device, so losses differ from eager's."""

    def add(run: Callable[..., None]) -> Callable[..., None]:
        PROGRAMS[run.__name__] = Program(run, packages, {"small": small, "larger": larger}, draws)
        return run

    return add


# ----- parts of several programs


def forever(*tensors: Tensor, batch: int) -> Iterator[tuple[Tensor, ...]]:
    while True:
        yield from zip(*(tensor.split(batch) for tensor in tensors), strict=True)


def train(steps: Any, model: nn.Module, optimizer: Any, loss_of: Callable[..., Tensor], data: Iterable[Any]) -> None:
    """The loop that most pages show, of a batch's tensors on the device."""
    model.to(steps.device).train()
    for batch in data:
        loss = loss_of(*(tensor.to(steps.device) for tensor in batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.end(loss)


def layers(inputs: int, width: int, depth: int, outputs: int) -> nn.Sequential:
    sizes = [inputs, *[width] * depth]
    hidden = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def points(classes: int) -> Iterator[tuple[Tensor, ...]]:
    inputs = torch.randn(512, 16)
    return forever(inputs, inputs[:, :classes].argmax(1), batch=32)


def words() -> tuple[Any, Callable[[int, int], str]]:
    """A tokenizer of 64 words, and texts of them: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", *(f"w{n}" for n in range(62))])}
    split = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", eos_token="<eos>")
    return made, lambda start, length: " ".join(f"w{(start + n) % 62}" for n in range(length))


def gpt2(width: int, depth: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": depth, "n_head": 2, "n_embd": width, "vocab_size": 64, "n_positions": 64}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=1, pad_token_id=0))


def watched(steps: Any) -> Any:
    """A callback for trainers of transformers."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        loss = None

        def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **options: Any) -> None:
            self.loss = logs.get("loss")

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            loss, self.loss = self.loss, None  # logged after the end of the step before
            steps.ended(loss)

    return Watch()


def arguments_for(steps: Any, theirs: Any) -> Any:
    """Arguments of a trainer of transformers: of the class `theirs`, with ours before it on the lazy device."""
    options = {"max_steps": 10**9, "logging_steps": 10, "per_device_train_batch_size": 8, "save_strategy": "no"}
    options |= {"report_to": [], "disable_tqdm": True, "bf16": False}
    if steps.device == "cpu" or not steps.integrates:
        os.environ["ACCELERATE_TORCH_DEVICE"] = steps.device
        return theirs("run", **options)
    from lazy_backend.integrations.transformers import LazyArguments

    return dataclass(type("Arguments", (LazyArguments, theirs), {}))("run", **options)


def fit(steps: Any, module: Any, *data: Any) -> None:
    """Train with Lightning. The module's `last_loss` is compared, if it has one."""
    import lightning

    if steps.device == "lazy":
        import lazy_backend.integrations.lightning  # noqa: F401

    class Watch(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *arguments: Any) -> None:
            steps.ended(outputs["loss"] if outputs else module.last_loss)

    options: dict[str, Any] = {"max_epochs": -1, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"enable_checkpointing": False, "logger": False, "callbacks": [Watch()]}
    if steps.device == "lazy" and not steps.integrates:
        from lightning.pytorch.strategies import SingleDeviceStrategy

        from lazy_backend.integrations.lightning import LazyAccelerator

        options["strategy"] = SingleDeviceStrategy("lazy:0", accelerator=LazyAccelerator())
    else:
        options["accelerator"] = steps.device
    lightning.Trainer(**options).fit(module, *data)


# ----- models and trainers


@program("x_transformers", small={"dim": 64, "depth": 2}, larger={"dim": 256, "depth": 4})
def x_transformers(steps: Any, dim: int, depth: int) -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    decoder = Decoder(dim=dim, depth=depth, heads=4)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=65, attn_layers=decoder))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    train(steps, model, optimizer, model, forever(torch.randint(256, (64, 65)), batch=4))


def _classify(steps: Any, model: nn.Module, optimizer: Any, side: int) -> None:
    data = forever(torch.randn(64, 3, side, side), torch.randint(10, (64,)), batch=8)
    train(steps, model, optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y), data)


@program("timm", small={"layers": 10, "side": 32}, larger={"layers": 18, "side": 64})
def timm_resnet(steps: Any, layers: int, side: int) -> None:
    import timm

    model = timm.create_model({10: "resnet10t", 18: "resnet18"}[layers], num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    _classify(steps, model, optimizer, side)


@program("timm", small={"width": 64, "depth": 2, "side": 32}, larger={"width": 192, "depth": 6, "side": 64})
def timm_vit(steps: Any, width: int, depth: int, side: int) -> None:
    import timm

    sizes = {"img_size": side, "patch_size": 8, "embed_dim": width, "depth": depth, "num_heads": width // 32}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes)
    _classify(steps, model, torch.optim.AdamW(model.parameters(), lr=1e-3), side)


@program("trl", "datasets", small={"width": 32, "depth": 2}, larger={"width": 128, "depth": 4})
def trl_sft(steps: Any, width: int, depth: int) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer, text = words()
    rows = Dataset.from_dict({"text": [text(start, 32) for start in range(256)]})
    options = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [watched(steps)]}
    SFTTrainer(gpt2(width, depth), arguments_for(steps, SFTConfig), **options).train()


@program("sentence_transformers", "datasets", small={"width": 32, "depth": 2}, larger={"width": 128, "depth": 4})
def sentence_transformers(steps: Any, width: int, depth: int) -> None:
    import sentence_transformers as theirs
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses, modules
    from transformers import BertConfig, BertModel

    tokenizer, text = words()
    sizes = {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 4 * width, "vocab_size": 64}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(**sizes, **still, num_attention_heads=2)).save_pretrained("bert")
    tokenizer.save_pretrained("bert")
    model = theirs.SentenceTransformer(modules=[modules.Transformer("bert"), modules.Pooling(width)], device="cpu")
    rows = {"anchor": [text(n, 12) for n in range(256)], "positive": [text(n + 1, 12) for n in range(256)]}
    arguments = arguments_for(steps, theirs.SentenceTransformerTrainingArguments)
    options = {"train_dataset": Dataset.from_dict(rows), "callbacks": [watched(steps)]}
    loss = losses.MultipleNegativesRankingLoss(model)
    theirs.SentenceTransformerTrainer(model, arguments, loss=loss, **options).train()


@program("peft", "transformers", small={"width": 32, "depth": 2}, larger={"width": 256, "depth": 4})
def peft_lora(steps: Any, width: int, depth: int) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(gpt2(width, depth), LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = forever(torch.randint(64, (64, 32)), batch=8)
    train(steps, model, optimizer, lambda tokens: model(input_ids=tokens, labels=tokens).loss, data)


@program("lightning", small={"width": 32}, larger={"width": 256})
def lightning_gan(steps: Any, width: int) -> None:
    import lightning

    class GAN(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(
                *(nn.Linear(16, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.BatchNorm1d(width)),
                *(nn.LeakyReLU(0.2), nn.Linear(width, 64), nn.Tanh()),
            )
            self.discriminator = nn.Sequential(layers(64, width, 2, 1), nn.Sigmoid())

        def training_step(self, batch: Any, index: int) -> None:
            (images,) = batch
            for_generator, for_discriminator = self.optimizers()
            noise = torch.randn(images.shape[0], 16).type_as(images)
            valid, fake = torch.ones(len(images), 1).type_as(images), torch.zeros(len(images), 1).type_as(images)
            self.toggle_optimizer(for_generator)
            loss = nn.functional.binary_cross_entropy(self.discriminator(self.generator(noise)), valid)
            self.manual_backward(loss)
            for_generator.step()
            for_generator.zero_grad()
            self.untoggle_optimizer(for_generator)
            self.toggle_optimizer(for_discriminator)
            real = nn.functional.binary_cross_entropy(self.discriminator(images), valid)
            other = nn.functional.binary_cross_entropy(self.discriminator(self.generator(noise).detach()), fake)
            self.last_loss = (real + other) / 2
            self.manual_backward(self.last_loss)
            for_discriminator.step()
            for_discriminator.zero_grad()
            self.untoggle_optimizer(for_discriminator)

        def configure_optimizers(self) -> Any:
            make = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999))
            return [make(self.generator.parameters()), make(self.discriminator.parameters())], []

    images = torch.utils.data.TensorDataset(torch.rand(512, 64))
    fit(steps, GAN(), torch.utils.data.DataLoader(images, batch_size=32))


@program("pytorch_forecasting", "lightning", small={"width": 8, "length": 12}, larger={"width": 32, "length": 24})
def forecasting_tft(steps: Any, width: int, length: int) -> None:
    import numpy
    import pandas
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    times = numpy.arange(200)
    frames = [pandas.DataFrame({"time": times, "group": str(n), "value": numpy.sin(times / 5 + n)}) for n in range(4)]
    known: dict[str, Any] = {
        "time_idx": "time",
        "target": "value",
        "group_ids": ["group"],
        "max_encoder_length": length,
    }
    known |= {"max_prediction_length": 6, "static_categoricals": ["group"], "time_varying_known_reals": ["time"]}
    known |= {"time_varying_unknown_reals": ["value"], "add_relative_time_idx": True}
    data = TimeSeriesDataSet(pandas.concat(frames, ignore_index=True), **known)
    options = {"hidden_size": width, "hidden_continuous_size": width, "attention_head_size": 2, "dropout": 0.0}
    model = TemporalFusionTransformer.from_dataset(data, learning_rate=0.01, loss=QuantileLoss(), **options)
    fit(steps, model, data.to_dataloader(train=True, batch_size=32, num_workers=0))


@program("diffusers", small={"width": 32, "side": 16}, larger={"width": 64, "side": 32})
def diffusers_unet(steps: Any, width: int, side: int) -> None:
    from diffusers import DDPMScheduler, UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": side, "layers_per_block": 1, "block_out_channels": (width, 2 * width)}
    model = UNet2DModel(in_channels=3, out_channels=3, **sizes, **blocks)
    scheduler = DDPMScheduler(num_train_timesteps=1000)

    def loss_of(images: Tensor) -> Tensor:
        noise = torch.randn(images.shape).to(images.device)
        times = torch.randint(0, scheduler.config.num_train_timesteps, (len(images),)).to(images.device)
        return nn.functional.mse_loss(model(scheduler.add_noise(images, noise, times), times).sample, noise)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train(steps, model, optimizer, loss_of, forever(torch.randn(32, 3, side, side), batch=4))


# ----- optimizers, metrics, losses


def _optimize(steps: Any, width: int, depth: int, name: str) -> None:
    import pytorch_optimizer

    model = layers(16, width, depth, 4)
    optimizer = pytorch_optimizer.load_optimizer(name)(model.parameters(), lr=1e-3)
    train(steps, model, optimizer, lambda x, y: nn.functional.cross_entropy(model(x), y), points(4))


for _name in ("soap", "adamp", "lion"):
    _run = partial(_optimize, name=_name)
    _sizes = {"small": {"width": 32, "depth": 2}, "larger": {"width": 128, "depth": 6}}
    PROGRAMS[f"optimizer_{_name}"] = Program(_run, ("pytorch_optimizer",), _sizes, draws=False)


@program("torchmetrics", small={"width": 32, "depth": 2}, larger={"width": 256, "depth": 4})
def torchmetrics(steps: Any, width: int, depth: int) -> None:
    import torchmetrics as theirs

    model = layers(16, width, depth, 5)
    task = {"task": "multiclass", "num_classes": 5}
    metrics = theirs.MetricCollection([theirs.Accuracy(**task), theirs.F1Score(**task)]).to(steps.device)

    def epochs() -> Iterator[Any]:
        for number, batch in enumerate(points(5), 1):
            yield batch
            if number % 16 == 0:
                metrics.compute()
                metrics.reset()

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        predictions = model(inputs)
        metrics.update(predictions, targets)
        return nn.functional.cross_entropy(predictions, targets)

    train(steps, model, torch.optim.Adam(model.parameters()), loss_of, epochs())


@program("pytorch_metric_learning", small={"width": 32, "batch": 16}, larger={"width": 128, "batch": 64})
def metric_learning(steps: Any, width: int, batch: int) -> None:
    from pytorch_metric_learning import losses, miners

    model = layers(16, width, 2, 16)
    miner, loss_function = miners.MultiSimilarityMiner(), losses.TripletMarginLoss()

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        embeddings = model(inputs)
        return loss_function(embeddings, labels, miner(embeddings, labels))

    data = forever(torch.randn(1024, 16), torch.randint(4, (1024,)), batch=batch)
    train(steps, model, torch.optim.Adam(model.parameters(), lr=1e-3), loss_of, data)


# ----- graphs, processes, equations


@program("torch_geometric", small={"width": 32, "batch": 16}, larger={"width": 128, "batch": 64})
def geometric_gcn(steps: Any, width: int, batch: int) -> None:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, global_mean_pool

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList([GCNConv(8, width), GCNConv(width, width), GCNConv(width, width)])
            self.last = nn.Linear(width, 2)

        def forward(self, x: Tensor, edges: Tensor, graphs: Tensor) -> Tensor:
            for convolution in self.convolutions[:-1]:
                x = convolution(x, edges).relu()
            return self.last(global_mean_pool(self.convolutions[-1](x, edges), graphs))

    counts = torch.randint(10, 28, (256,)).tolist()  # as in MUTAG
    graphs = [Data(torch.randn(n, 8), torch.randint(n, (2, 2 * n)), y=torch.tensor(n % 2)) for n in counts]
    model = GCN()
    loader = DataLoader(graphs, batch_size=batch, shuffle=True)
    data = ((graph,) for _ in repeat(None) for graph in loader)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(steps, model, optimizer, lambda g: nn.functional.cross_entropy(model(g.x, g.edge_index, g.batch), g.y), data)


@program("gpytorch", small={"count": 100}, larger={"count": 400})
def gpytorch_exact(steps: Any, count: int) -> None:
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, inputs: Tensor, targets: Tensor, likelihood: Any) -> None:
            super().__init__(inputs, targets, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.covariance = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.covariance(x))

    inputs = torch.linspace(0, 1, count)
    targets = (torch.sin(inputs * 6.28) + torch.randn(count) * 0.2).to(steps.device)
    inputs = inputs.to(steps.device)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(inputs, targets, likelihood)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    train(steps, model, optimizer, lambda: -objective(model(inputs), targets), repeat(()))


@program("pyro", small={"count": 50}, larger={"count": 2000}, draws=True)
def pyro_svi(steps: Any, count: int) -> None:
    import pyro
    import pyro.distributions as dist
    from pyro.infer.autoguide import AutoDiagonalNormal
    from pyro.nn import PyroModule, PyroSample

    class Regression(PyroModule):
        def __init__(self) -> None:
            super().__init__()
            zero, ten = torch.zeros((), device=steps.device), torch.tensor(10.0, device=steps.device)
            self.linear = PyroModule[nn.Linear](3, 1)
            self.linear.weight = PyroSample(dist.Normal(zero, 1.0).expand([1, 3]).to_event(2))
            self.linear.bias = PyroSample(dist.Normal(zero, ten).expand([1]).to_event(1))
            self.sigma = PyroSample(dist.Uniform(zero, ten))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            mean = self.linear(x).squeeze(-1)
            with pyro.plate("data", x.shape[0]):
                pyro.sample("obs", dist.Normal(mean, self.sigma), obs=y)
            return mean

    x = torch.randn(count, 3)
    y = (x.sum(1) + 0.1 * torch.randn(count)).to(steps.device)
    x = x.to(steps.device)
    model = Regression()
    svi = pyro.infer.SVI(model, AutoDiagonalNormal(model), pyro.optim.Adam({"lr": 0.03}), pyro.infer.Trace_ELBO())
    while True:
        steps.end(svi.step(x, y))


@program("torchdiffeq", small={"batch": 20, "times": 10}, larger={"batch": 200, "times": 20})
def torchdiffeq_ode(steps: Any, batch: int, times: int) -> None:
    from torchdiffeq import odeint

    class Equation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            return self.net(y**3)

    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    t = torch.linspace(0.0, 25.0, 1000)
    with torch.no_grad():
        path = odeint(lambda t, y: y**3 @ matrix, torch.tensor([[2.0, 0.0]]), t)
    model = Equation()

    def batches() -> Iterator[Any]:
        while True:
            starts = torch.randperm(len(t) - times)[:batch]
            yield t[:times], torch.stack([path[starts + number] for number in range(times)])

    def loss_of(t: Tensor, targets: Tensor) -> Tensor:
        return (odeint(model, targets[0], t) - targets).abs().mean()

    train(steps, model, torch.optim.RMSprop(model.parameters(), lr=1e-3), loss_of, batches())


# ----- reinforcement learning, scikit-learn


@program("stable_baselines3", "gymnasium", small={"length": 64}, larger={"length": 256}, draws=True)
def sb3_ppo(steps: Any, length: int) -> None:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:  # after the epochs of the one before
            steps.ended(self.model.logger.name_to_value.get("train/loss"))

    model = PPO("MlpPolicy", "CartPole-v1", n_steps=length, device=steps.device, seed=0)
    model.learn(10**9, callback=Watch(), log_interval=10**9)


@program("torchrl", "tensordict", small={"width": 64, "batch": 32}, larger={"width": 256, "batch": 256})
def torchrl_dqn(steps: Any, width: int, batch: int) -> None:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, OneHot, TensorDictReplayBuffer
    from torchrl.modules import MLP, QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    net = MLP(in_features=4, out_features=2, num_cells=[width, width])
    actor = QValueActor(net, in_keys=["observation"], spec=OneHot(2)).to(steps.device)
    loss_module = DQNLoss(actor, action_space=OneHot(2), delay_value=True)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    updater = SoftUpdate(loss_module, eps=0.99)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(4096), batch_size=batch)
    done = torch.rand(4096, 1) < 0.05
    after = {"observation": torch.randn(4096, 4), "reward": torch.ones(4096, 1), "done": done, "terminated": done}
    actions = nn.functional.one_hot(torch.randint(2, (4096,)), 2)
    buffer.extend(TensorDict({"observation": torch.randn(4096, 4), "action": actions, "next": after}, [4096]))
    while True:
        loss = loss_module(buffer.sample().to(steps.device))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updater.step()
        steps.end(loss)


@program("skorch", "sklearn", small={"width": 10, "depth": 1}, larger={"width": 256, "depth": 3})
def skorch(steps: Any, width: int, depth: int) -> None:
    from sklearn.datasets import make_classification
    from skorch import NeuralNetClassifier
    from skorch.callbacks import Callback

    class EndsSteps(Callback):
        def on_batch_end(self, net: Any, training: bool = False, loss: Any = None, **options: Any) -> None:
            steps.end(loss)

    x, y = make_classification(1000, 20, n_informative=10, random_state=0)
    options = {"max_epochs": 10**9, "lr": 0.1, "iterator_train__shuffle": True, "device": steps.device, "verbose": 0}
    model = layers(20, width, depth, 2)
    net = NeuralNetClassifier(model, criterion=nn.CrossEntropyLoss, callbacks=[EndsSteps], **options)
    net.fit(x.astype("float32"), y.astype("int64"))
