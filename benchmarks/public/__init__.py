"""All public programs by name."""

from __future__ import annotations

from benchmarks.public import generative, language, science, vision
from benchmarks.public.program import Program

_EXAMPLES = "pytorch/examples", "77f55b9"
_TORCHVISION = ("torchvision==0.28.0",)
_ALL = (
    Program(vision.unet, "milesial/Pytorch-UNet", "21d7850", "unet/unet_model.py"),
    Program(vision.simclr, "sthalles/SimCLR", "1848fc9", "models/resnet_simclr.py", _TORCHVISION),
    Program(
        vision.byol, "lucidrains/byol-pytorch", "2993126", "byol_pytorch/byol_pytorch.py", (*_TORCHVISION, "einops")
    ),
    Program(
        vision.vq_autoencoder,
        "lucidrains/vector-quantize-pytorch",
        "0d7d1aa",
        "examples/autoencoder.py",
        ("einops", "einx", "torch-einops-utils"),
    ),
    Program(vision.vq_vae_2, "rosinality/vq-vae-2-pytorch", "ef5f67c", "vqvae.py"),
    Program(vision.deit, "facebookresearch/deit", "7e160fe", "models.py", ("timm==1.0.31", *_TORCHVISION)),
    Program(vision.mae, "facebookresearch/mae", "efb2a80", "models_mae.py", ("timm==1.0.31", *_TORCHVISION)),
    Program(vision.siamese, *_EXAMPLES, "siamese_network/main.py", _TORCHVISION),
    Program(vision.super_resolution, *_EXAMPLES, "super_resolution/model.py"),
    Program(vision.mnist, *_EXAMPLES, "mnist/main.py"),
    Program(vision.vae, *_EXAMPLES, "vae/main.py"),
    Program(vision.dcgan, *_EXAMPLES, "dcgan/main.py"),
    Program(vision.fast_neural_style, *_EXAMPLES, "fast_neural_style/neural_style/transformer_net.py", _TORCHVISION),
    Program(vision.faster_rcnn, "pytorch/vision", "0.28.0", "torchvision/models/detection/faster_rcnn.py"),
    Program(language.word_lstm, *_EXAMPLES, "word_language_model/model.py"),
    Program(language.word_transformer, *_EXAMPLES, "word_language_model/model.py"),
    Program(language.nanogpt, "karpathy/nanoGPT", "3adf61e", "model.py"),
    Program(language.mingpt, "karpathy/minGPT", "37baab7", "mingpt/model.py"),
    Program(language.nanochat, "karpathy/nanochat", "92d63d4", "nanochat/gpt.py"),
    Program(language.translation, "jadore801120/attention-is-all-you-need-pytorch", "132907d", "transformer/Models.py"),
    Program(language.mamba, "johnma2006/mamba-minimal", "03de542", "model.py", ("einops",)),
    Program(language.clip, "mlfoundations/open_clip", "89fb801", "src/open_clip/model.py", ("timm", "ftfy")),
    Program(language.sentence_pairs, "huggingface/sentence-transformers", "6.2.0", "sentence_transformers/losses"),
    Program(science.gat, *_EXAMPLES, "gat/main.py"),
    Program(science.gcn, *_EXAMPLES, "gcn/main.py"),
    Program(science.pygcn, "tkipf/pygcn", "1600b5b", "pygcn/models.py"),
    Program(science.molecules, "pyg-team/pytorch_geometric", "2.8.1", "torch_geometric/nn", ("torch-geometric",)),
    Program(science.ppo, "vwxyzjn/cleanrl", "fe8d8a0", "cleanrl/ppo.py", ("gymnasium",)),
    Program(science.nerf, "yenchenlin/nerf-pytorch", "63a5a63", "run_nerf_helpers.py"),
    Program(science.tabnet, "dreamquark-ai/tabnet", "2c0c4eb", "pytorch_tabnet/tab_network.py", ("scikit-learn",)),
    Program(
        science.diffusion,
        "lucidrains/denoising-diffusion-pytorch",
        "faed4db",
        "denoising_diffusion_pytorch/denoising_diffusion_pytorch.py",
        ("einops", "ema-pytorch", *_TORCHVISION),
    ),
    Program(generative.wgan_gp, "eriklindernoren/PyTorch-GAN", "36d3c77", "implementations/wgan_gp/wgan_gp.py"),
    Program(generative.cyclegan, "eriklindernoren/PyTorch-GAN", "36d3c77", "implementations/cyclegan/models.py"),
    Program(generative.waveglow, "NVIDIA/waveglow", "8afb643", "glow.py"),
    Program(generative.glow, "rosinality/glow-pytorch", "97081ff", "model.py"),
    Program(generative.stargan, "yunjey/stargan", "94dd002", "model.py"),
    Program(generative.guided_diffusion, "openai/guided-diffusion", "22e0df8", "guided_diffusion/unet.py"),
    Program(generative.dit, "facebookresearch/DiT", "ed81ce2", "models.py", ("timm==1.0.31",)),
    Program(vision.detr, "facebookresearch/detr", "29901c5", "models/detr.py", ("scipy",)),
    Program(vision.raft, "princeton-vl/RAFT", "2888e15", "core/raft.py"),
    Program(vision.dino, "facebookresearch/dino", "7c446df", "main_dino.py", _TORCHVISION),
    Program(vision.barlow_twins, "facebookresearch/barlowtwins", "8e8d284", "main.py", _TORCHVISION),
    Program(language.llama2c, "karpathy/llama2.c", "350e04f", "model.py"),
    Program(language.lora, "microsoft/LoRA", "c4593f0", "examples/NLG/src/model.py"),
    Program(
        language.performer,
        "lucidrains/performer-pytorch",
        "fc8b784",
        "performer_pytorch/performer_pytorch.py",
        ("einops",),
    ),
    Program(science.timesnet, "thuml/Time-Series-Library", "4e938a1", "models/TimesNet.py", ("einops",)),
    Program(science.autoformer, "thuml/Time-Series-Library", "4e938a1", "models/Autoformer.py", ("einops",)),
    Program(science.egnn, "lucidrains/egnn-pytorch", "d3ba97d", "egnn_pytorch/egnn_pytorch.py", ("einops",)),
    Program(science.tacotron2, "NVIDIA/tacotron2", "185cd24", "model.py"),
    Program(science.conformer, "lucidrains/conformer", "fc70d51", "conformer/conformer.py", ("einops",)),
)
PROGRAMS = {program.name: program for program in _ALL}
LOOPS = PROGRAMS
"""As `tests.loops` takes them."""
