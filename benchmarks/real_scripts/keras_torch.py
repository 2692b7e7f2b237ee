import os; os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np
from keras import layers
x, y = np.random.rand(3200, 28, 28, 1).astype("float32"), keras.utils.to_categorical(np.random.randint(10, size=3200), 10)
model = keras.Sequential([keras.Input(shape=(28, 28, 1)), layers.Conv2D(16, (3, 3), activation="relu"), layers.MaxPooling2D((2, 2)),
                          layers.Flatten(), layers.Dropout(0.5), layers.Dense(10, activation="softmax")])
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(x, y, batch_size=32, epochs=3, validation_split=0.1)
model.save("mnist.keras")
