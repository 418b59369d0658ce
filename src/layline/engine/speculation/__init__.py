"""Speculative decoding: guesses at a request's next tokens, verified by one pass of the model.

A proposer names drafts d1 .. dk for the tokens to come. One decode step then feeds the request's
last token and the drafts, a row each, and the sampler draws a token from every row: t0 after the
last token, t1 after d1, and so on. t0 is right whatever was proposed. t1 was drawn given d1, so it
is the request's next token exactly when t0 is d1; and so on until the first token that differs from
its draft, which is still a token of the model and is kept.

Why the text does not change: Leviathan, Kalman and Matias (2023) accept a draft d, proposed with
probability q(d), with probability min(1, p(d) / q(d)), and otherwise draw from what is left of the
model's distribution p, max(0, p - q) renormalised; the result is distributed as p. A proposal that
says one token only has q(d) = 1, so d is kept with probability p(d), and otherwise another token is
drawn from p without d. Drawing t from p and keeping d where t = d does both at once. It does more
than they need: the draw of a token depends on the request's seed and the token's index alone
(``sampling.uniform``), so a request's tokens are those of plain decoding with the same seed, one by
one, however good or bad the drafts are. What drafts change is how many steps that takes. Rows of a
verified step are rows of an ordinary decode step, so greedy answers differ from plain decoding no
more than answers in another batch do.
"""
