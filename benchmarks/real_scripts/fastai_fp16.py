from fastai.vision.all import *
dls = ImageDataLoaders.from_folder("data/img", valid="val", item_tfms=Resize(64), bs=8)
learn = Learner(dls, xresnet18(n_out=4), metrics=accuracy).to_fp16()
learn.fit_one_cycle(8, 3e-3)
