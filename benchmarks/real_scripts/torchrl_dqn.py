import torch
from tensordict.nn import TensorDictModule as Mod, TensorDictSequential as Seq
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv
from torchrl.modules import EGreedyModule, MLP, QValueModule
from torchrl.objectives import DQNLoss, SoftUpdate
env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter()); env.set_seed(0)
policy = Seq(Mod(MLP(out_features=env.action_spec.shape[-1], num_cells=[64, 64]), in_keys=["observation"], out_keys=["action_value"]), QValueModule(spec=env.action_spec))
explore = Seq(policy, EGreedyModule(env.action_spec, annealing_num_steps=100_000)); rb = ReplayBuffer(storage=LazyTensorStorage(100_000))
collector = Collector(env, explore, frames_per_batch=100, total_frames=4000, init_random_frames=500)
loss = DQNLoss(value_network=policy, action_space=env.action_spec, delay_value=True); optim, updater = torch.optim.Adam(loss.parameters(), lr=0.02), SoftUpdate(loss, eps=0.99)
for i, data in enumerate(collector):
    rb.extend(data)
    for _ in range(10 if len(rb) > 500 else 0): l = loss(rb.sample(128)); l["loss"].backward(); optim.step(); optim.zero_grad(); explore[1].step(data.numel()); updater.step()
