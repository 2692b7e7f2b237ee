"""Writes ./data: what the drivers read. Run once in this folder; each driver's folder gets a copy of what it needs."""
import csv, json, os, random, numpy as np, torch
from PIL import Image
random.seed(0); np.random.seed(0); torch.manual_seed(0)
os.makedirs("data", exist_ok=True)
words = ("the a cat dog house tree river runs jumps sees likes green red blue big small old new quickly slowly and but with of in on under "
         "mountain city bird car road light night day water fire stone paper book").split()
sent = lambda n=12: " ".join(random.choices(words, k=n))
# tokenizer and tiny Llama, in float32 and bf16
from tokenizers import Tokenizer, models, pre_tokenizers, trainers, decoders
from transformers import PreTrainedTokenizerFast, LlamaConfig, LlamaForCausalLM, BertConfig, BertModel, BertForSequenceClassification
tk = Tokenizer(models.BPE(unk_token="<unk>")); tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True); tk.decoder = decoders.ByteLevel()
tk.train_from_iterator([sent() for _ in range(500)], trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
tok = PreTrainedTokenizerFast(tokenizer_object=tk, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
cfg = LlamaConfig(vocab_size=len(tok), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                  max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=3)
m = LlamaForCausalLM(cfg)
m.save_pretrained("data/llama"); tok.save_pretrained("data/llama")
m.to(torch.bfloat16).save_pretrained("data/llama-bf16"); tok.save_pretrained("data/llama-bf16")
# WordPiece BERT
import transformers
open("data/vocab.txt", "w").write("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + words))
wt = transformers.BertTokenizerFast(vocab="data/vocab.txt") if int(transformers.__version__.split(".")[0]) >= 5 else transformers.BertTokenizerFast("data/vocab.txt")
bc = BertConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, max_position_embeddings=128)
BertModel(bc).save_pretrained("data/bert"); wt.save_pretrained("data/bert")
# text
os.makedirs("data/text", exist_ok=True)
with open("data/text/train.jsonl", "w") as f:
    for _ in range(2000): f.write(json.dumps({"text": sent(random.randint(4, 30))}) + "\n")
# images in folders, a CSV of captions
for split, n in (("train", 60), ("val", 10)):
    for c in range(4):
        os.makedirs(f"data/img/{split}/c{c}", exist_ok=True)
        for i in range(n): Image.fromarray(np.random.randint(0, 255, (64, 64, 3), dtype=np.uint8)).save(f"data/img/{split}/c{c}/{i}.png")
with open("data/clip.csv", "w") as f:
    w = csv.writer(f, delimiter="\t"); w.writerow(["filepath", "title"])
    for _ in range(8):
        for c in range(4):
            for i in range(60): w.writerow([f"data/img/train/c{c}/{i}.png", sent(6)])
os.makedirs("data/clip", exist_ok=True)
json.dump({"model_cfg": {"embed_dim": 64, "vision_cfg": {"image_size": 64, "layers": 2, "width": 64, "patch_size": 16, "head_width": 16},
  "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 64, "heads": 4, "layers": 2}},
  "preprocess_cfg": {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28]}}, open("data/clip/open_clip_config.json", "w"))
# YOLO
for split, n in (("train", 64), ("val", 8)):
    os.makedirs(f"data/yolo/images/{split}", exist_ok=True); os.makedirs(f"data/yolo/labels/{split}", exist_ok=True)
    for i in range(n):
        Image.fromarray(np.random.randint(0, 255, (64, 64, 3), dtype=np.uint8)).save(f"data/yolo/images/{split}/{i}.png")
        with open(f"data/yolo/labels/{split}/{i}.txt", "w") as f:
            for _ in range(random.randint(1, 4)): f.write(f"{random.randint(0, 2)} {random.uniform(.3, .7):.3f} {random.uniform(.3, .7):.3f} .3 .3\n")
open("data/yolo/data.yaml", "w").write("path: data/yolo\ntrain: images/train\nval: images/val\nnames: {0: a, 1: b, 2: c}\n")
# spaCy
import spacy; from spacy.tokens import DocBin
for split, n in (("train", 400), ("dev", 40)):
    nlp = spacy.blank("en"); db = DocBin()
    for _ in range(n):
        d = nlp(sent()); d.cats = {"A": float(random.random() < .5)}; d.cats["B"] = 1 - d.cats["A"]; db.add(d)
    db.to_disk(f"data/{split}.spacy")
