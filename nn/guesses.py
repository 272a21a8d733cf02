"""Names of other libraries, and what to write for them here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Never

INSTEAD = {
    "AdaptiveMaxPool2d": "nn.GlobalMaxPool2d() for one value a channel, nn.MaxPool2d(kernel_size) for windows",
    "Adamax": "nn.Adam(lr)",
    "BCELoss": "nn.BCEWithLogitsLoss(), of a network without a Sigmoid at its end",
    "BatchNorm": "nn.BatchNorm1d(features) or nn.BatchNorm2d(features)",
    "BatchNormalization": "nn.BatchNorm1d(features) or nn.BatchNorm2d(features)",
    "Concat": "nn.Parallel(*layers)",
    "Concatenate": "nn.Parallel(*layers)",
    "Conv1d": "nn.Conv2d on samples (length, 1, channels), with kernels (k, 1)",
    "ConvTranspose2d": "there is no transposed convolution; a layer of your own is a subclass of nn.Layer",
    "CosineAnnealingLR": "nn.schedules.Cosine(lr, steps)",
    "DataLoader": "nn.Loader(dataset, batch=32)",
    "Dataset": "nn.data.Dataset(x, y)",
    "Dense": "nn.Linear(in_features, out_features)",
    "Dropout2d": "nn.Dropout(rate)",
    "ELU": "nn.SiLU() or nn.LeakyReLU()",
    "ExponentialLR": "nn.schedules.Exponential(lr, factor)",
    "F1": "a metric is a mean over rows, F1 is not: compute it from trainer.predict(x).argmax(axis=-1)",
    "GRU": "nn.LSTM(in_features, features) and nn.RNN are the recurrent layers",
    "GroupNorm": "nn.LayerNorm, nn.RMSNorm, nn.BatchNorm2d and nn.LocalResponseNorm are there",
    "Hardtanh": "nn.Tanh() or nn.ReLU()",
    "Identity": "leave the layer out",
    "InstanceNorm2d": "nn.LayerNorm, nn.RMSNorm, nn.BatchNorm2d and nn.LocalResponseNorm are there",
    "KLDivLoss": "nn.CrossEntropyLoss(), or a subclass of nn.Loss",
    "L1Loss": "nn.MAELoss()",
    "LambdaLR": "any function step -> rate is a schedule",
    "ModelCheckpoint": "nn.callbacks.KeepCheckpoints(nn.Checkpoints(directory))",
    "Module": "a layer is a subclass of nn.Layer, a model nn.Network(nn.Sequential(...), in_shape)",
    "ModuleList": "nn.Sequential(*layers), or nn.Parallel(*layers) side by side",
    "MultiStepLR": "nn.schedules.MultiStep(lr, steps)",
    "PReLU": "nn.LeakyReLU(slope)",
    "Parameter": "a layer's specs() says which parameters it has: nn.Spec(shape, nn.initializers.he)",
    "ReLU6": "nn.ReLU()",
    "ReduceLROnPlateau": "nn.schedules.Plateau(lr)",
    "SmoothL1Loss": "nn.HuberLoss()",
    "Softplus": "nn.SiLU() or nn.GELU()",
    "StandardScaler": "nn.data.Dataset(x, y, scale=1 / std, shift=-mean / std)",
    "StepLR": "nn.schedules.Step(lr, every)",
    "Swish": "nn.SiLU()",
    "Tensor": "arrays are NumPy's",
    "TensorDataset": "nn.data.Dataset(x, y)",
    "Transformer": "nn.TransformerBlock(features, heads), nn.models.transformer",
    "TransformerEncoderLayer": "nn.TransformerBlock(features, heads)",
    "clip_grad_norm_": "nn.SGD(lr, clip=nn.ClipGlobalNorm(1.0))",
    "functional": "layers are objects: nn.ReLU()",
    "init": "nn.initializers",
    "kaiming_normal_": "nn.initializers.he",
    "kaiming_uniform_": "nn.initializers.he",
    "lr_scheduler": "nn.schedules",
    "manual_seed": "nn.Trainer(network, loss, optimizer, seed=0)",
    "no_grad": "predict and evaluate compute no gradients",
    "tensor": "arrays are NumPy's",
    "train_test_split": "nn.data.hold_out(dataset, 0.1) splits a data set",
    "utils": "nn.SGD(lr, clip=nn.ClipGlobalNorm(1.0)) clips gradients",
    "xavier_normal_": "nn.initializers.glorot",
    "xavier_uniform_": "nn.initializers.glorot",
}


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like this one; None where none is much like it."""
    import difflib  # takes milliseconds, which a run without a mistake need not spend

    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), None)


def refuse_name(module: str, name: str, instead: Mapping[str, str] = INSTEAD) -> Never:
    """Raise AttributeError for a name that a module lacks, with what to write instead or what there is."""
    hint = ""
    if not name.startswith("_"):
        own = [key for key in dir(sys.modules[module]) if not key.startswith("_")]
        full_names = {key.lower(): f"{module}.{key}" for key in own}
        full_names |= {key.lower(): f"nn.{key}" for key in getattr(sys.modules.get("nn"), "__all__", ())}
        near = nearest(name.lower(), full_names, cutoff=0.75)
        meant = instead.get(name) or (near and f"did you mean {full_names[near]}?")
        hint = f": {meant or f'dir({module}) lists what there is'}"
    raise AttributeError(f"{module} has no {name!r}{hint}", name=name)
