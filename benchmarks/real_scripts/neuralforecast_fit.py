import numpy as np, pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NBEATS, NHITS
df = pd.concat([pd.DataFrame({"unique_id": f"s{i}", "ds": pd.date_range("2020-01-01", periods=200, freq="D"), "y": np.sin(np.arange(200) / 7) + np.random.rand(200)}) for i in range(8)])
horizon = 12
nf = NeuralForecast(models=[NBEATS(input_size=2 * horizon, h=horizon, max_steps=250), NHITS(input_size=2 * horizon, h=horizon, max_steps=250)], freq="D")
nf.fit(df=df)
print(nf.predict().head())
