import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from require import require

np = require("numpy")
torch = require("torch")
transformers = require("transformers")

from tiny import save_tiny_model  # noqa: E402

import lm  # noqa: E402
import weights  # noqa: E402

GREEDY = SimpleNamespace(temperature=0, top_k=0, top_p=1, repetition_penalty=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def reference(folder):
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network.generation_config.eos_token_id = None  # Every reply of the comparison is full length.
    return network


@pytest.fixture
def model(folder):
    return lm.LanguageModel.load(str(folder), device="cpu", dtype="float32", rows=4, context=200)


def prompt(length, seed=0):
    return [random.Random(f"{length} {seed}").randrange(10, 250) for _ in range(length)]


def full_pass(reference, ids):
    """The logits after `ids`, by a plain forward pass over all of them, without any cache."""
    with torch.inference_mode():
        return reference(torch.tensor([ids]), use_cache=False).logits[0, -1]


def generate(reference, ids, count):
    """What transformers' own generate() appends to `ids`, greedily."""
    out = reference.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
    )
    return out[0, len(ids) :].tolist()


class Driver:
    """Greedy generation over chosen rows, each sequence with the ids it has so far."""

    def __init__(self, model):
        self.model = model
        self.replies = {}

    def start(self, row, ids):
        logits = self.model.prefill(row, ids)
        self.replies[row] = [self.model.choose(logits, 0, GREEDY, ids, random.Random(0))]

    def step(self, rows):
        logits = self.model.decode(rows, [self.replies[row][-1] for row in rows])
        assert len(logits) == len(rows)
        for i, row in enumerate(rows):
            self.replies[row].append(self.model.choose(logits, i, GREEDY, [], random.Random(0)))


class TestForwardPass:
    def test_prefill_gives_the_last_position_s_logits(self, model, reference):
        ids = prompt(20)
        torch.testing.assert_close(
            torch.from_numpy(model.prefill(0, ids).line(0)), full_pass(reference, ids)
        )

    @pytest.mark.parametrize("portions", [(1, 19), (7, 7, 6), (19, 1), (1,) * 20])
    def test_prefill_in_portions_continues_the_row(self, model, reference, portions):
        ids, done = prompt(20), 0
        for portion in portions:
            logits = model.prefill(2, ids[done : done + portion])
            done += portion
        torch.testing.assert_close(torch.from_numpy(logits.line(0)), full_pass(reference, ids))

    def test_lines_follow_the_order_of_the_rows_asked_for(self, model, reference):
        ids = {row: prompt(5 + row, row) for row in range(4)}
        for row, each in ids.items():
            model.prefill(row, each)
        for rows in ([3, 0, 2], [1], [2, 3], [0, 3], [0, 1, 2, 3], [1, 0]):
            for fixed in (False, True):
                model.fixed = fixed
                logits = model.decode(rows, [40 + row for row in rows])
                for i, row in enumerate(rows):
                    torch.testing.assert_close(
                        torch.from_numpy(logits.line(i)),
                        full_pass(reference, [*ids[row], 40 + row]),
                    )
                    model.truncate(row, len(ids[row]))

    def test_a_truncated_row_goes_on_from_what_is_left(self, model, reference):
        ids = prompt(80)
        model.prefill(1, ids)
        model.truncate(1, 30)
        logits = model.prefill(1, [9, 8, 7])
        torch.testing.assert_close(
            torch.from_numpy(logits.line(0)), full_pass(reference, [*ids[:30], 9, 8, 7])
        )
        model.truncate(1, 0)
        logits = model.prefill(1, [5])
        torch.testing.assert_close(torch.from_numpy(logits.line(0)), full_pass(reference, [5]))

    def test_a_row_can_be_filled_to_its_end_and_no_further(self, model, reference):
        ids = prompt(199)
        model.prefill(0, ids)
        logits = model.decode([0], [33])
        torch.testing.assert_close(
            torch.from_numpy(logits.line(0)), full_pass(reference, [*ids, 33]), rtol=1e-4, atol=1e-4
        )
        model.prefill(1, [5])
        for fixed in (False, True):
            model.fixed = fixed
            with pytest.raises(ValueError, match="200 tokens, not 201"):
                model.decode([1, 0], [1, 1])
        with pytest.raises(ValueError, match="200 tokens, not 202"):
            model.prefill(0, [1, 1])
        logits = model.decode([1], [6])  # What was refused has changed nothing.
        torch.testing.assert_close(torch.from_numpy(logits.line(0)), full_pass(reference, [5, 6]))

    @pytest.mark.parametrize(
        ("rows", "ids"), [([], []), ([0, 0], [1, 1]), ([0, 1], [1]), ([0], [1, 2])]
    )
    def test_decode_refuses_what_is_not_one_id_a_row(self, model, rows, ids):
        with pytest.raises(ValueError):
            model.decode(rows, ids)

    def test_prefill_refuses_nothing_and_truncate_more_than_there_is(self, model):
        with pytest.raises(ValueError):
            model.prefill(0, [])
        model.prefill(0, [1, 2])
        for length in (3, -1):
            with pytest.raises(ValueError):
                model.truncate(0, length)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Mistral", "GPTNeoX", "Phi3", "Olmo2"])
    def test_other_architectures(self, folder, kind, attention):
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=300,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=6 if kind == "GPTNeoX" else 2,
            max_position_embeddings=256,
            pad_token_id=0,
        )
        config._attn_implementation = attention
        network = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = lm.LanguageModel(network, tokenizer, name=kind, rows=3, context=None)
        ids = prompt(10)
        model.prefill(0, ids)
        model.prefill(2, ids[:4])
        logits = model.decode([0, 2], [11, 12])
        for i, each in enumerate(([*ids, 11], [*ids[:4], 12])):
            torch.testing.assert_close(
                torch.from_numpy(logits.line(i)), full_pass(network, each), rtol=1e-4, atol=1e-4
            )


class TestSameText:
    """Field report 106: greedy float32, alone, together, joined later, left early."""

    LENGTHS = (1, 7, 50)

    @pytest.fixture
    def expected(self, reference):
        return [generate(reference, prompt(n), 30) for n in self.LENGTHS]

    @pytest.mark.parametrize("fixed", [False, True])
    def test_alone(self, model, expected, fixed):
        model.fixed = fixed
        for length, reply in zip(self.LENGTHS, expected, strict=True):
            driver = Driver(model)
            driver.start(3, prompt(length))
            for _ in range(29):
                driver.step([3])
            assert driver.replies[3] == reply
            model.truncate(3, 0)

    @pytest.mark.parametrize("fixed", [False, True])
    def test_together(self, model, expected, fixed):
        model.fixed = fixed
        driver = Driver(model)
        for row, length in enumerate(self.LENGTHS):
            driver.start(row, prompt(length))
        for _ in range(29):
            driver.step([0, 1, 2])
        assert list(driver.replies.values()) == expected

    @pytest.mark.parametrize("fixed", [False, True])
    def test_joined_midway_and_one_leaving_early(self, model, expected, fixed):
        model.fixed = fixed
        driver = Driver(model)
        driver.start(0, prompt(50))
        for _ in range(5):
            driver.step([0])
        driver.start(2, prompt(7))
        for _ in range(8):
            driver.step([0, 2])
        early = driver.replies.pop(2)
        model.truncate(2, 0)
        driver.start(2, prompt(1))
        for _ in range(16):
            driver.step([2, 0])
        for _ in range(13):
            driver.step([2])
        assert early == expected[1][:9]
        assert driver.replies == {0: expected[2], 2: expected[0]}

    def test_fixed_gives_the_same_bits_in_any_row_and_company(self, model):
        model.fixed = True
        ids = prompt(70)

        def lines(row, company):
            for each in range(4):
                model.truncate(each, 0)
            for other, length in company.items():
                model.prefill(other, prompt(length, 1))
            model.prefill(row, ids)
            rows = [row, *company]
            return [model.decode(rows, [token] * len(rows)).line(0).tolist() for token in (4, 5)]

        alone = lines(0, {})
        for row, company in ((0, {1: 3, 2: 150, 3: 64}), (3, {0: 1}), (2, {}), (1, {3: 190})):
            assert lines(row, company) == alone


class TestChoose:
    def logits(self, *lines):
        return lm.Logits(torch.tensor(lines), range(len(lines)))

    def test_greedy_takes_the_lowest_id_of_equals_and_draws_nothing(self, model):
        draw = random.Random(3)
        state = draw.getstate()
        logits = self.logits([0.0, 2.0, 2.0], [5.0, 5.0, 5.0])
        assert [model.choose(logits, i, GREEDY, [], draw) for i in (0, 1)] == [1, 0]
        assert draw.getstate() == state

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("temperature", [0, 1])
    def test_what_is_no_number_is_an_error_and_does_not_stay(self, model, bad, temperature):
        params = SimpleNamespace(**{**vars(GREEDY), "temperature": temperature})
        before = model.prefill(1, [4, 5]).line(0).tolist()
        for keys, values in model._cache._layers:
            keys[1] = values[1] = bad
        logits = lm.Logits(torch.tensor([[0.0, bad, 1.0]]), [1])
        with pytest.raises(RuntimeError, match="not finite"):
            model.choose(logits, 0, params, [], random.Random(0))
        model.truncate(1, 0)
        assert model.prefill(1, [4, 5]).line(0).tolist() == before

    def test_an_id_ruled_out_by_minus_infinity_is_never_drawn(self, model):
        params = SimpleNamespace(temperature=5.0, top_k=0, top_p=1, repetition_penalty=1)
        logits = self.logits([0.0, float("-inf"), 0.0])
        drawn = {model.choose(logits, 0, params, [], random.Random(i)) for i in range(100)}
        assert drawn == {0, 2}


class TestTokens:
    def test_logprobs_are_the_model_s_own_whatever_the_schema(self, model, reference):
        ids = prompt(20)
        logits = model.prefill(0, ids)
        exact = torch.log_softmax(full_pass(reference, ids), -1)
        values, top = exact.topk(5)
        token = model.choose(logits, 0, GREEDY, ids, random.Random(0), np.array([9, 77]))
        assert token in (9, 77)
        (first, own), *pairs = model.logprobs(logits, 0, token, 5)
        assert (first, own) == (token, pytest.approx(exact[token].item(), abs=1e-4))
        assert [id for id, _ in pairs] == top.tolist()
        assert [each for _, each in pairs] == pytest.approx(values.tolist(), abs=1e-4)

    def test_token_gives_text_and_bytes(self, model):
        (a,) = model.encode("a")
        half = model.encode("é")[0]
        assert model.token(a) == ("a", b"a")
        assert model.token(half) == ("\ufffd", b"\xc3")
        assert model.token(2) == ("<|im_end|>", b"")
        assert model.token(299) == ("", b"")  # The network has more columns than there are tokens.


class TestLoading:
    def test_what_a_model_says_of_itself(self, model):
        assert (model.name, model.rows, model.context) == ("tiny-llama", 4, 200)
        assert (model.device, model.dtype) == ("cpu", "float32")
        assert model.eos_ids == {0, 2, 7}  # The settings' list, and the tokenizer's own.
        assert model.bytes_per_token == 2 * 3 * 2 * 8 * 4

    def test_a_budget_of_memory_leaves_rows_out(self, folder):
        row = 100 * 2 * 3 * 2 * 8 * 4
        for budget, rows in ((10 * row, 4), (3 * row + 1, 3), (row, 1)):
            loaded = self.budgeted(folder, budget)
            assert loaded.rows == rows
        with pytest.raises(lm.ModelError, match=f"{row:,} bytes .* {row - 1:,} are allowed"):
            self.budgeted(folder, row - 1)

    def budgeted(self, folder, budget):
        return lm.LanguageModel.load(
            str(folder), dtype="float32", context=100, rows=4, kv_memory=budget
        )

    @pytest.mark.parametrize(("wanted", "length"), [(None, 256), (10**9, 256), (64, 64)])
    def test_context_is_cut_to_the_model_s(self, folder, wanted, length):
        assert lm.LanguageModel.load(str(folder), context=wanted, rows=1).context == length

    def test_context_is_cut_to_the_attention_window(self, folder):
        config = transformers.MistralConfig(
            hidden_size=48, intermediate_size=9, num_hidden_layers=1, sliding_window=32
        )
        assert lm._context(config, 2048) == 32

    def test_a_state_in_place_of_keys_and_values_is_refused(self):
        config = SimpleNamespace(
            layer_types=["linear_attention", "full_attention"], model_type="some"
        )
        with pytest.raises(lm.ModelError, match="more than keys and values"):
            lm._context(config, 2048)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("no/such/folder", "there is no folder no/such/folder"),
            ("./nowhere", "there is no folder ./nowhere"),
            ("nowhere.gguf", "there is no file nowhere.gguf"),
        ],
    )
    def test_what_is_not_there(self, name, message):
        with pytest.raises(lm.ModelError, match=message) as info:
            lm.LanguageModel.load(name)
        assert "\n" not in str(info.value)

    def test_a_folder_that_is_no_model(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(lm.ModelError, match="cannot load model") as info:
            lm.LanguageModel.load(str(tmp_path))
        assert "\n" not in str(info.value)

    def test_a_gguf_file_that_is_none(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        path = tmp_path / "broken.gguf"
        path.write_bytes(b"GGUF?")
        with pytest.raises(lm.ModelError, match="cannot load model") as info:
            lm.LanguageModel.load(str(path))
        assert "\n" not in str(info.value)

    def test_a_device_that_is_not_there(self, folder):
        for device in ("xla", "cuda:x", "cpu:-1", "meta"):
            with pytest.raises(lm.ModelError, match=f"no device {device} here: choose auto"):
                lm.LanguageModel.load(str(folder), device=device)

    @pytest.mark.parametrize(
        ("can", "chosen"),
        [
            ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, torch.bfloat16),
            ({"cpu_name": "Intel Xeon", "avx512_bf16": True}, torch.float32),
            ({"cpu_name": "AMD EPYC", "avx512_bf16": True}, torch.bfloat16),
            ({"cpu_name": "AMD EPYC", "avx512_bf16": False}, torch.float32),
            ({}, torch.float32),
        ],
    )
    def test_the_dtype_that_a_processor_is_fast_with(self, can, chosen, monkeypatch):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: can)
        assert lm._dtype("auto", "cpu") is chosen

    def test_an_unknown_dtype(self, folder):
        with pytest.raises(lm.ModelError, match="no dtype int3"):
            lm.LanguageModel.load(str(folder), dtype="int3")

    def test_an_empty_cache_takes_up_no_memory(self):
        statm = Path("/proc/self/statm")
        if not statm.exists():
            pytest.skip("no /proc to read the memory in use from")
        pages = int(statm.read_text().split()[1])
        cache = lm._zeros((1 << 10, 1 << 20), torch.bfloat16, "cpu")
        assert not cache[-1, -5:].any()
        assert int(statm.read_text().split()[1]) - pages < cache.nbytes / 4096 / 10


class TestTokenizerLoaded:
    def test_encode_and_text_from_many_threads_at_once(self, model):
        texts = ["one <|im_end|> two", "plain", "with 😀", "x" * 5000] * 10
        chats = [[{"role": "user", "content": text}] for text in texts]
        alone = [(model.encode(t), model.encode(c)) for t, c in zip(texts, chats, strict=True)]
        together = {}

        def work(i):
            together[i] = model.encode(texts[i]), model.encode(chats[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [together[i] for i in range(len(texts))] == alone


@pytest.mark.model
class TestRealModel:
    def ask(self, model, question, count=24):
        ids = model.encode([{"role": "user", "content": question}])
        logits, reply = model.prefill(0, ids), []
        while len(reply) < count:
            token = model.choose(logits, 0, GREEDY, ids + reply, random.Random(0))
            if token in model.eos_ids:
                break
            reply.append(token)
            logits = model.decode([0], [token])
        model.truncate(0, 0)
        return reply

    def test_it_knows_a_capital(self, real_model):
        assert real_model.name == weights.NAME
        reply = self.ask(real_model, "What is the capital of France?")
        assert real_model.text(reply) == "The capital of France is Paris."

    def test_bytes_per_token(self, real_model):
        size = {"float32": 4, "bfloat16": 2, "float16": 2}[real_model.dtype]
        assert real_model.bytes_per_token == 2 * 30 * 3 * 64 * size

    def test_its_prompt_is_the_one_it_was_trained_on(self, real_model):
        ids = real_model.encode([{"role": "user", "content": "Hi"}])
        assert real_model._tokenizer._marked.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_digits_stand_alone(self, real_model):
        ids = real_model.encode("in  2024")
        assert [real_model.text([i]) for i in ids] == ["in", "  ", "2", "0", "2", "4"]
