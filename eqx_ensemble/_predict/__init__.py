from ._predict import predict as predict
