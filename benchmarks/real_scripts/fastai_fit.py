from fastai.vision.all import *
dls = ImageDataLoaders.from_folder("data/img", valid="val", item_tfms=Resize(64), bs=8)
learn = Learner(dls, xresnet18(n_out=4), metrics=error_rate)
learn.fit(8, lr=1e-3)
learn.save("stage-1")
