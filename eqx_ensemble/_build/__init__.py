from ._build import build as build
