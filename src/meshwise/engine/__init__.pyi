from meshwise.engine import model_stream as model_stream
